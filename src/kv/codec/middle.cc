#include "kv/codec/middle.h"

#include <algorithm>
#include <vector>

#include "kv/codec/codec.h"
#include "kv/codec/kivi.h"
#include "kv/layout.h"

namespace longkv {

void decode_middle_k(const KvHeadView& head, int64_t begin, int64_t end, float* dst) {
  const KvMiddle& m = *head.middle;
  std::vector<float> kept(size_t(m.dim_k));
  for (int64_t r = begin; r < end; ++r, dst += head.dim_k) {
    const auto add_mean = [&] {
      for (int64_t c = 0; m.mean_k != nullptr && c < head.dim_k; ++c) dst[c] += m.mean_k[c];
    };
    if (m.dim_k == 0) {
      std::fill_n(dst, head.dim_k, 0.0f);
      add_mean();
      continue;
    }
    float* row = m.channels == nullptr && m.directions == nullptr ? dst : kept.data();
    if (kv_type_blocked(m.k_type)) {
      kivi_decode_key(m.k_type, m.k + row_offset(block_of(r, kKiviRows), m.k_stride), r % kKiviRows, m.dim_k, row);
    } else {
      decode_row(m.k_type, m.k + row_offset(r, m.k_stride), m.dim_k, row);
    }
    if (m.alpha != nullptr) {
      for (int64_t i = 0; i < m.dim_k; ++i) row[i] *= m.alpha[i];
    }
    if (m.directions != nullptr) {
      // The key whose product with any query is what the held numbers give.
      for (int64_t c = 0; c < head.dim_k; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < m.dim_k; ++i) sum += double(m.directions[c * m.dim_k + i]) * kept[size_t(i)];
        dst[c] = float(sum);
      }
    } else if (m.channels != nullptr) {
      std::fill_n(dst, head.dim_k, 0.0f);
      for (int64_t i = 0; i < m.dim_k; ++i) dst[m.channels[i]] = kept[size_t(i)];
    }
    add_mean();
  }
}

void decode_middle_v(const KvHeadView& head, int64_t begin, int64_t end, float* dst) {
  const KvMiddle& m = *head.middle;
  for (int64_t r = begin; r < end; ++r, dst += head.dim_v) {
    if (m.dim_k == 0) {
      for (int64_t c = 0; c < head.dim_v; ++c) dst[c] = m.mean_v == nullptr ? 0.0f : m.mean_v[c];
    } else if (kv_type_blocked(m.v_type)) {
      kivi_decode_value(m.v_type, m.v + row_offset(block_of(r, kKiviRows), m.v_stride), r % kKiviRows, m.dim_v, dst);
    } else {
      decode_row(m.v_type, m.v + row_offset(r, m.v_stride), m.dim_v, dst);
    }
  }
}

}  // namespace longkv
