#include "kv/keep/rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kv/select/topk.h"

namespace longkv {

std::vector<int64_t> best_rows(std::span<const float> scores, const int32_t* pos, int64_t k) {
  const int64_t n = int64_t(scores.size());
  k = std::clamp<int64_t>(k, 0, n);
  std::vector<int64_t> rows = all_rows(n);
  if (k == n) return rows;
  const auto better = [&](int64_t a, int64_t b) {
    const uint32_t x = score_key(scores[size_t(a)]), y = score_key(scores[size_t(b)]);
    if (x != y) return x > y;
    return pos == nullptr ? a > b : pos[a] > pos[b];
  };
  std::nth_element(rows.begin(), rows.begin() + ptrdiff_t(k), rows.end(), better);
  rows.resize(size_t(k));
  std::sort(rows.begin(), rows.end());
  return rows;
}

int64_t worst_row(std::span<const float> scores, const int32_t* pos) {
  int64_t worst = 0;
  for (int64_t r = 1; r < int64_t(scores.size()); ++r) {
    const uint32_t x = score_key(scores[size_t(r)]), y = score_key(scores[size_t(worst)]);
    const bool older = pos == nullptr ? r < worst : pos[r] < pos[worst];
    if (x < y || (x == y && older)) worst = r;
  }
  return worst;
}

int64_t oldest_row(const KvHeadView& head, int64_t from) {
  int64_t oldest = -1;
  for (int64_t r = 0; r < head.rows; ++r) {
    if (head.pos[r] >= from && (oldest < 0 || head.pos[r] < head.pos[oldest])) oldest = r;
  }
  return oldest;
}

std::vector<char> newest_rows(const KvHeadView& head, int64_t n) {
  std::vector<char> mask(size_t(head.rows), 0);
  n = std::clamp<int64_t>(n, 0, head.rows);
  if (head.pos == nullptr) {
    std::fill_n(mask.begin() + ptrdiff_t(head.rows - n), n, char{1});
    return mask;
  }
  std::vector<int64_t> order = all_rows(head.rows);
  std::nth_element(order.begin(), order.begin() + ptrdiff_t(n), order.end(),
                   [&](int64_t a, int64_t b) { return head.pos[a] > head.pos[b]; });
  for (int64_t i = 0; i < n; ++i) mask[size_t(order[size_t(i)])] = 1;
  return mask;
}

std::vector<int64_t> all_rows(int64_t n) {
  std::vector<int64_t> rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), int64_t{0});
  return rows;
}

std::vector<int64_t> rows_of_mask(std::span<const char> mask) {
  std::vector<int64_t> rows;
  for (size_t r = 0; r < mask.size(); ++r) {
    if (mask[r] != 0) rows.push_back(int64_t(r));
  }
  return rows;
}

void visit_budgets(KvState& state, std::vector<int64_t>& budgets) {
  state.values("budgets", std::span(budgets));
  const bool good = std::all_of(budgets.begin(), budgets.end(),
                                [](int64_t b) { return b >= 0 && b <= std::numeric_limits<int32_t>::max(); });
  state.expect(good, "the budgets");
}

}  // namespace longkv
