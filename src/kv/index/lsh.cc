#include "kv/index/lsh.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "base/checked.h"
#include "kv/codec/codec.h"
#include "kv/index/columns.h"
#include "kv/index/kinds.h"

namespace longkv {

namespace {

constexpr int64_t kDecodeRows = 64;
constexpr uint64_t kSeed = 0x6c6f6e676b76;
// Steps of the cosine in the table of chances: its error is below 1e-3 of a log chance wherever one is drawn.
constexpr int64_t kCosines = 1 << 14;

}  // namespace

LshIndex::LshIndex(const IndexSpec& spec, const KvShape& shape)
    : dim_(shape.dim_k),
      bits_(spec.hash_bits),
      tables_(spec.tables),
      columns_(round_up(int64_t(spec.hash_bits) * spec.tables, kColumnTile)),
      heads_(size_t(shape.kv_heads)) {
  // One projection for all heads and layers, as in the released system.
  std::mt19937_64 engine(kSeed);
  std::normal_distribution<float> normal;
  projections_.assign(size_t(columns_ * dim_), 0.0f);
  for (int64_t column = 0; column < bits_ * tables_; ++column) {
    for (int64_t c = 0; c < dim_; ++c) {
      projections_[size_t((column / kColumnTile * dim_ + c) * kColumnTile + column % kColumnTile)] = normal(engine);
    }
  }
  log_inclusion_.resize(size_t(kCosines + 1));
  for (int64_t i = 0; i <= kCosines; ++i) {
    log_inclusion_[size_t(i)] = float(std::log(std::max(1e-30, inclusion(2.0 * double(i) / double(kCosines) - 1.0))));
  }
  for (Head& head : heads_) head.mean.assign(size_t(dim_), 0.0f);
}

double LshIndex::inclusion(double c) const {
  const double p = 1.0 - std::acos(std::clamp(c, -1.0, 1.0)) / M_PI;
  const double shared = std::pow(p, bits_), tables = double(tables_);
  // 1 - (none) - (exactly one), in an order that does not cancel.
  return 1.0 - std::pow(1.0 - shared, tables - 1.0) * (tables * shared + 1.0 - shared);
}

void LshIndex::append(int kv_head, const KvHeadView& keys, int64_t, int64_t end) {
  Head& head = heads_[size_t(kv_head)];
  head.rows = end;
  if (head.centred && end - head.hashed <= 1) hash_rows(head, keys, end);
}

void LshIndex::finish_prompt(int kv_head, const KvHeadView& keys) {
  Head& head = heads_[size_t(kv_head)];
  if (!head.centred && head.rows > 0) {
    std::vector<double> sum(size_t(dim_), 0.0);
    std::vector<float> rows(static_cast<size_t>(kDecodeRows * dim_));
    for (int64_t row = 0; row < head.rows; row += kDecodeRows) {
      const int64_t stop = std::min(head.rows, row + kDecodeRows);
      decode_k_rows(keys, row, stop, rows.data());
      for (int64_t i = 0; i < (stop - row) * dim_; ++i) sum[size_t(i % dim_)] += double(rows[size_t(i)]);
    }
    for (int64_t c = 0; c < dim_; ++c) head.mean[size_t(c)] = float(sum[size_t(c)] / double(head.rows));
    head.centred = true;
  }
  hash_rows(head, keys, head.rows);
}

// n vectors [n][dim] to codes [tables] at codes + i, stride between tables.
void LshIndex::codes_of(const float* x, int64_t n, uint16_t* codes, int64_t stride) const {
  thread_local std::vector<float> products;
  products.resize(size_t(n * columns_));
  for (int64_t tile = 0; tile < columns_ / kColumnTile; ++tile) {
    column_products(x, n, dim_, projections_.data() + tile * dim_ * kColumnTile, products.data() + tile * kColumnTile,
                    columns_);
  }
  for (int64_t i = 0; i < n; ++i) {
    const float* p = products.data() + i * columns_;
    for (int64_t t = 0; t < tables_; ++t) {
      unsigned code = 0;
      for (int b = 0; b < bits_; ++b) code |= unsigned(p[t * bits_ + b] > 0) << b;
      codes[t * stride + i] = uint16_t(code);
    }
  }
}

void LshIndex::hash_rows(Head& head, const KvHeadView& keys, int64_t end) {
  std::vector<float> rows(static_cast<size_t>(kDecodeRows * dim_));
  if (head.open.empty()) head.open.resize(size_t(tables_ * kSegment));
  while (head.hashed < end) {
    const int64_t begin = head.hashed, in_segment = begin % kSegment;
    const int64_t stop = std::min({end, begin + kDecodeRows, begin - in_segment + kSegment});
    decode_k_rows(keys, begin, stop, rows.data());
    for (int64_t i = 0; i < (stop - begin) * dim_; ++i) rows[size_t(i)] -= head.mean[size_t(i % dim_)];
    codes_of(rows.data(), stop - begin, head.open.data() + in_segment, kSegment);
    head.hashed = stop;
    if (stop % kSegment == 0) close_segment(head);
  }
}

// Counting sort of the open segment's rows by code, table by table.
void LshIndex::close_segment(Head& head) {
  const int64_t buckets = int64_t{1} << bits_;
  Segment& segment = head.segments.emplace_back();
  segment.starts.assign(size_t(tables_ * (buckets + 1)), 0);
  segment.rows.resize(size_t(tables_ * kSegment));
  std::vector<uint16_t> next(static_cast<size_t>(buckets));
  for (int64_t t = 0; t < tables_; ++t) {
    const uint16_t* codes = head.open.data() + t * kSegment;
    uint16_t* starts = segment.starts.data() + t * (buckets + 1);
    for (int64_t i = 0; i < kSegment; ++i) ++starts[codes[i] + 1];
    for (int64_t b = 0; b < buckets; ++b) starts[b + 1] = uint16_t(starts[b + 1] + starts[b]);
    std::copy(starts, starts + buckets, next.data());
    for (int64_t i = 0; i < kSegment; ++i) segment.rows[size_t(t * kSegment + next[codes[i]]++)] = uint16_t(i);
  }
}

void LshIndex::truncate(int kv_head, const KvHeadView& keys, int64_t rows) {
  Head& head = heads_[size_t(kv_head)];
  if (rows >= head.rows) return;
  head.rows = rows;
  if (rows == 0) {
    head.centred = false;
    head.hashed = 0;
    head.segments.clear();
    return;
  }
  if (head.hashed <= rows) return;
  // Codes of a sorted segment that opens again are made anew.
  const bool reopens = rows / kSegment < int64_t(head.segments.size());
  if (reopens) head.segments.resize(size_t(rows / kSegment));
  head.hashed = reopens ? rows / kSegment * kSegment : rows;
  hash_rows(head, keys, rows);
}

// hit(row) for every row of `rows` and table where the row has the query's code.
template <class Hit>
void LshIndex::each_collision(const Head& head, const uint16_t* codes, RowRange rows, const Hit& hit) const {
  const int64_t buckets = int64_t{1} << bits_;
  const int64_t end = std::min(rows.end, head.hashed);
  for (int64_t s = rows.begin / kSegment; s * kSegment < end; ++s) {
    const int64_t first = s * kSegment;
    if (s < int64_t(head.segments.size())) {
      const Segment& segment = head.segments[size_t(s)];
      for (int64_t t = 0; t < tables_; ++t) {
        const uint16_t* starts = segment.starts.data() + t * (buckets + 1) + codes[t];
        const uint16_t* ids = segment.rows.data() + t * kSegment;
        for (int64_t i = starts[0]; i < starts[1]; ++i) {
          const int64_t row = first + ids[i];
          if (row >= rows.begin && row < end) hit(row);
        }
      }
      continue;
    }
    for (int64_t t = 0; t < tables_; ++t) {
      const uint16_t* own = head.open.data() + t * kSegment;
      for (int64_t row = std::max(first, rows.begin); row < end; ++row) {
        if (own[row - first] == codes[t]) hit(row);
      }
    }
  }
}

void LshIndex::draw(int kv_head, const KvHeadView& view, const float* q, RowRange rows, std::vector<int64_t>& drawn,
                    std::vector<float>& log_weight) const {
  const Head& head = heads_[size_t(kv_head)];
  thread_local std::vector<uint8_t> seen;
  thread_local std::vector<uint16_t> codes;
  thread_local std::vector<float> key;
  drawn.clear();
  log_weight.clear();
  if (rows.end <= rows.begin) return;
  codes.resize(size_t(tables_));
  codes_of(q, 1, codes.data(), 1);
  seen.assign(size_t(rows.end - rows.begin), 0);
  each_collision(head, codes.data(), rows, [&](int64_t row) {
    uint8_t& count = seen[size_t(row - rows.begin)];
    if (count < 2 && ++count == 2) drawn.push_back(row);
  });
  std::sort(drawn.begin(), drawn.end());
  key.resize(size_t(dim_));
  double q2 = 0;
  for (int64_t c = 0; c < dim_; ++c) q2 += double(q[c]) * q[c];
  for (const int64_t row : drawn) {
    decode_k_rows(view, row, row + 1, key.data());
    float dot = 0, k2 = 0;
    for (int64_t c = 0; c < dim_; ++c) {
      const float k = key[size_t(c)] - head.mean[size_t(c)];
      dot += q[c] * k;
      k2 += k * k;
    }
    const float size = std::sqrt(float(q2) * k2);
    const float cosine = size > 0 ? std::clamp(dot / size, -1.0f, 1.0f) : 0.0f;
    log_weight.push_back(-log_inclusion_[size_t(std::lround((cosine + 1.0f) * 0.5f * float(kCosines)))]);
  }
}

void LshIndex::score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
                     int64_t stride) const {
  const Head& head = heads_[size_t(kv_head)];
  std::vector<uint16_t> codes(static_cast<size_t>(tables_));
  for (int j = 0; j < n_q; ++j) {
    float* own = scores + j * stride - block_begin;
    std::fill(own + block_begin, own + block_end, 0.0f);
    codes_of(q + j * dim_, 1, codes.data(), 1);
    each_collision(head, codes.data(), {block_begin, block_end}, [&](int64_t row) { own[row] += 1.0f; });
  }
}

bool LshIndex::valid(const Segment& segment) const {
  const int64_t buckets = int64_t{1} << bits_;
  for (int64_t t = 0; t < tables_; ++t) {
    const uint16_t* starts = segment.starts.data() + t * (buckets + 1);
    for (int64_t b = 0; b < buckets; ++b) {
      if (starts[b] > starts[b + 1]) return false;
    }
    if (starts[buckets] > kSegment) return false;
  }
  return std::all_of(segment.rows.begin(), segment.rows.end(), [](uint16_t r) { return r < kSegment; });
}

void LshIndex::visit(KvState& state, std::span<const KvHeadView> heads) {
  const int64_t buckets = int64_t{1} << bits_;
  for (size_t h = 0; h < heads_.size() && state.ok(); ++h) {
    const KvState::Level level(state, "h", int64_t(h));
    Head& head = heads_[h];
    head.rows = heads[h].rows;
    int64_t numbers[2] = {head.hashed, head.centred ? 1 : 0};
    state.values("numbers", std::span(numbers));
    if (!state.expect(numbers[0] >= 0 && numbers[0] <= head.rows && numbers[1] >= 0 && numbers[1] <= 1,
                      "the numbers of hashed rows")) {
      return;
    }
    head.hashed = numbers[0];
    head.centred = numbers[1] == 1;
    state.values("mean", std::span(head.mean));
    head.segments.resize(size_t(head.hashed / kSegment));
    for (size_t s = 0; s < head.segments.size() && state.ok(); ++s) {
      const KvState::Level of_segment(state, "s", int64_t(s));
      Segment& segment = head.segments[s];
      segment.starts.resize(size_t(tables_ * (buckets + 1)));
      segment.rows.resize(size_t(tables_ * kSegment));
      state.values("starts", std::span(segment.starts));
      state.values("rows", std::span(segment.rows));
      if (state.loading() && !state.expect(valid(segment), "the hash tables")) return;
    }
    const auto codes = uint64_t(tables_ * kSegment);
    state.list("open", head.open, codes);
    if (!state.loading() || !state.ok()) continue;
    const bool sized = head.open.size() == codes || (head.open.empty() && head.hashed == 0);
    const bool bounded =
        std::all_of(head.open.begin(), head.open.end(), [&](uint16_t c) { return int64_t(c) < buckets; });
    if (!state.expect(sized && bounded, "the codes of the open segment")) return;
  }
}

int64_t LshIndex::bytes_drawn(int64_t n) const {
  const int64_t open = n % kSegment, full = n / kSegment;
  return tables_ * (full * (4 + (kSegment >> bits_) * 2) + open * 2);
}

int64_t LshIndex::bytes_held() const {
  int64_t bytes = int64_t(projections_.size()) * 4;
  for (const Head& head : heads_) {
    bytes += int64_t(head.open.size()) * 2;
    for (const Segment& s : head.segments) bytes += int64_t(s.starts.size() + s.rows.size()) * 2;
  }
  return bytes;
}

Result<std::unique_ptr<BlockIndex>> make_lsh_index(const IndexSpec& spec, const KvShape& shape, int64_t) {
  return std::unique_ptr<BlockIndex>(std::make_unique<LshIndex>(spec, shape));
}

}  // namespace longkv
