#include "kv/tail/value_means.h"

#include <algorithm>

#include "kv/codec/codec.h"

namespace longkv {

namespace {

constexpr int64_t kDecodeRows = 64;

}  // namespace

ValueMeans::ValueMeans(const KvShape& shape) : dim_(shape.dim_v), heads_(size_t(shape.kv_heads)) {
  for (Head& head : heads_) {
    head.sum.assign(size_t(dim_), 0.0);
    head.values.resize(size_t(kDecodeRows * dim_));
  }
}

void ValueMeans::append(int kv_head, const KvHeadView& view, int64_t begin, int64_t end) {
  Head& head = heads_[size_t(kv_head)];
  for (int64_t row = begin; row < end;) {
    const int64_t stop = std::min(end, row + kDecodeRows);
    decode_v_rows(view, row, stop, head.values.data());
    for (const float* v = head.values.data(); row < stop; ++row, v += dim_) {
      if (row % kStride == 0 && row > 0) head.stored.insert(head.stored.end(), head.sum.begin(), head.sum.end());
      for (int64_t c = 0; c < dim_; ++c) head.sum[size_t(c)] += double(v[c]);
    }
  }
  head.rows = end;
}

void ValueMeans::truncate(int kv_head, const KvHeadView& view, int64_t rows) {
  Head& head = heads_[size_t(kv_head)];
  if (rows >= head.rows) return;
  const int64_t copies = rows / kStride;
  if (copies == 0) {
    head.sum.assign(size_t(dim_), 0.0);
  } else {
    std::copy_n(head.stored.begin() + (copies - 1) * dim_, dim_, head.sum.begin());
  }
  head.stored.resize(size_t(std::max<int64_t>(0, copies - 1) * dim_));
  head.rows = copies * kStride;
  if (head.rows < rows) append(kv_head, view, head.rows, rows);
}

void ValueMeans::mean(int kv_head, float* out) const {
  const Head& head = heads_[size_t(kv_head)];
  const double inverse = head.rows > 0 ? 1.0 / double(head.rows) : 0.0;
  for (int64_t c = 0; c < dim_; ++c) out[c] = float(head.sum[size_t(c)] * inverse);
}

void ValueMeans::visit(KvState& state, std::span<const KvHeadView> heads) {
  for (size_t h = 0; h < heads_.size() && state.ok(); ++h) {
    const KvState::Level level(state, "h", int64_t(h));
    Head& head = heads_[h];
    head.rows = heads[h].rows;
    head.stored.resize(head.rows > 0 ? size_t((head.rows - 1) / kStride * dim_) : 0);
    state.values("sum", std::span(head.sum));
    state.values("stored", std::span(head.stored));
  }
}

int64_t ValueMeans::bytes_held() const {
  int64_t bytes = 0;
  for (const Head& head : heads_) bytes += int64_t(head.stored.size() + head.sum.size()) * int64_t(sizeof(double));
  return bytes;
}

}  // namespace longkv
