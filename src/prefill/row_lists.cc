#include "prefill/row_lists.h"

#include <algorithm>

namespace longkv {

void a_shape_rows(int64_t sink, int64_t window, RowRange queries, std::vector<RowRange>& out) {
  out.clear();
  append_range(out, {0, std::min(sink, queries.end)});
  append_range(out, {std::max<int64_t>(0, queries.begin - std::max<int64_t>(1, window) + 1), queries.end});
}

void vertical_slash_rows(std::span<const RowRange> columns, std::span<const RowRange> distances, RowRange queries,
                         std::vector<RowRange>& out) {
  out.clear();
  auto column = columns.begin();
  // Columns up to where the queries begin; the others are among the queries' own rows, which come last.
  const auto take_columns = [&](int64_t before) {
    for (; column != columns.end() && column->begin < before; ++column) {
      append_range(out, {column->begin, std::min(column->end, queries.end)});
    }
  };
  // The largest distances come first, so that rows ascend.
  for (size_t i = distances.size(); i-- > 0;) {
    const RowRange rows{std::max<int64_t>(0, queries.begin - distances[i].end + 1), queries.end - distances[i].begin};
    if (rows.end <= 0 || distances[i].begin >= distances[i].end) continue;
    take_columns(std::min(rows.begin, queries.begin));
    append_range(out, {rows.begin, std::min(rows.end, queries.end)});
  }
  take_columns(queries.begin);
  append_range(out, queries);
}

void block_list_rows(std::span<const int64_t> blocks, int64_t block, RowRange queries, std::vector<RowRange>& out) {
  out.clear();
  for (const int64_t b : blocks) {
    if (b * block >= queries.begin) break;
    append_range(out, rows_of(b, block, queries.end));
  }
  append_range(out, queries);
}

int64_t causal_pairs(std::span<const RowRange> rows, RowRange queries) {
  int64_t pairs = 0;
  for (const RowRange& r : rows) {
    const int64_t before = std::min(r.end, queries.begin) - r.begin;
    if (before > 0) pairs += before * count_of(queries);
    // A row among the queries is seen by its own query and the later ones.
    const int64_t first = std::max(r.begin, queries.begin), last = std::min(r.end, queries.end) - 1;
    if (first <= last) pairs += (last - first + 1) * (2 * queries.end - first - last) / 2;
  }
  return pairs;
}

}  // namespace longkv
