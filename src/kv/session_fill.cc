// Seeded random keys and values, so that speed at a depth can be measured without computing it.
#include <algorithm>
#include <vector>

#include "base/error.h"
#include "kv/codec/codec.h"
#include "kv/session_impl.h"

namespace longkv {

namespace {

constexpr int64_t kFillRows = 1024;
// A sum of four uniform bytes is close to normal: mean 510, variance 4 * (256^2 - 1) / 12.
constexpr float kByteSumMean = 510.0f;
constexpr float kByteSumScale = 1.0f / 147.8f;

// n values of unit variance. Every value depends on its index alone, so the fill is the same for every thread count;
// shifts and exclusive ors only, which vectorise on every target.
void fill_unit(uint32_t seed, int64_t first, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t x = uint32_t(first + i) ^ seed;
    for (int round = 0; round < 3; ++round) {
      x += (x << 10) + 0x9e3779b9u;
      x ^= x >> 6;
      x += x << 3;
      x ^= x >> 11;
      x += x << 15;
    }
    const uint32_t sum = (x & 255u) + (x >> 8 & 255u) + (x >> 16 & 255u) + (x >> 24);
    dst[i] = (float(int32_t(sum)) - kByteSumMean) * kByteSumScale;
  }
}

}  // namespace

Status KvSession::fill_random(int64_t n, uint64_t seed) {
  Impl& impl = *impl_;
  const KvShape& shape = cache_.shape();
  if (tokens().v != 0 || cache_.tokens(0).v != 0) {
    return fail(Code::kInvalidArgument, "random rows go into an empty KV cache; it holds {} tokens", tokens().v);
  }
  if (n < 0 || n > cache_.capacity().v) {
    return fail(Code::kInvalidArgument, "cannot fill {} of {} KV rows; raise the context size", n, cache_.capacity().v);
  }
  const int64_t k_width = int64_t(shape.kv_heads) * shape.dim_k, v_width = int64_t(shape.kv_heads) * shape.dim_v;
  const int64_t rows_at_once = std::min(kFillRows, n);
  std::vector<float> k(size_t(rows_at_once * k_width)), v(size_t(rows_at_once * v_width));
  constexpr int64_t kPiece = 32;  // rows per task
  for (int layer = 0; layer < shape.layers; ++layer) {
    const uint32_t k_seed = uint32_t(seed ^ (seed >> 32)) * 2654435761u + uint32_t(layer) * 2u * 40503u;
    const uint32_t v_seed = k_seed ^ 0x5bd1e995u;
    cache_.expect_rows(layer, RowCount{n});
    for (int64_t first = 0; first < n; first += kFillRows) {
      const int64_t rows = std::min(kFillRows, n - first);
      impl.pool.run((rows + kPiece - 1) / kPiece, [&](int64_t piece, int) {
        const int64_t begin = piece * kPiece, count = std::min(kPiece, rows - begin);
        fill_unit(k_seed, (first + begin) * k_width, count * k_width, k.data() + begin * k_width);
        fill_unit(v_seed, (first + begin) * v_width, count * v_width, v.data() + begin * v_width);
      });
      LONGKV_TRY(cache_.append(layer, k.data(), v.data(), rows, impl.pool));
      load_views(layer);
      if (!evicts(layer)) impl.selector->append(layer, impl.views, first, first + rows, impl.pool);
    }
    LONGKV_TRY(finish_prefill(layer));
  }
  return {};
}

}  // namespace longkv
