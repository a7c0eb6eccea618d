#include "ops/matmul_bf16.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/cpu.h"
#include "base/float16.h"
#include "ops/packed_rows.h"
#include "quant/tensor_type.h"

#ifdef LONGKV_WITH_ONEDNN
#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>
#endif

namespace longkv {

#ifdef LONGKV_WITH_ONEDNN

namespace {

constexpr int64_t kTileRows = 64;

// oneDNN runs on OpenMP threads; inside a task of our pool it must stay on this one.
class OneOpenMpThread {
 public:
  OneOpenMpThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneOpenMpThread() { omp_set_num_threads(before_); }

 private:
  int before_;
};

void round_row(const float* src, int64_t n, bf16_t* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = to_bf16(src[i]);
}

// x: [tokens][cols], w: [rows][cols], y: [tokens][rows] with stride y_stride. Throws dnnl::error.
void product(bf16_t* x, bf16_t* w, float* y, int64_t tokens, int64_t rows, int64_t cols, int64_t y_stride) {
  using dnnl::memory;
  using Type = memory::data_type;
  const memory::desc src({tokens, cols}, Type::bf16, memory::dims{cols, 1});
  const memory::desc weights({cols, rows}, Type::bf16, memory::dims{1, cols});
  const memory::desc dst({tokens, rows}, Type::f32, memory::dims{y_stride, 1});
  // Engine, stream and primitive belong to the thread that runs them; oneDNN caches the generated kernels.
  thread_local dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  thread_local dnnl::stream stream(engine);
  const dnnl::matmul primitive(dnnl::matmul::primitive_desc(dnnl::matmul::desc(src, weights, dst), engine));
  primitive.execute(stream, {{DNNL_ARG_SRC, memory(src, engine, x)},
                             {DNNL_ARG_WEIGHTS, memory(weights, engine, w)},
                             {DNNL_ARG_DST, memory(dst, engine, y)}});
  stream.wait();
}

bool onednn_multiplies() { return active_isa() >= IsaLevel::kAvx512 && active_isa() < IsaLevel::kNeon; }

// Every tile is a single-threaded oneDNN product inside a task of the pool.
bool onednn_matmul(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool) {
  thread_local std::vector<bf16_t> rounded;
  rounded.resize(std::max(rounded.size(), size_t(tokens * w.cols)));
  bf16_t* x16 = rounded.data();
  pool.run(tokens, [&](int64_t t, int) { round_row(x + t * w.cols, w.cols, x16 + t * w.cols); });

  std::atomic<bool> failed{false};
  pool.run((w.rows + kTileRows - 1) / kTileRows, [&](int64_t task, int) {
    thread_local std::vector<float> row;
    thread_local std::vector<uint8_t> unpacked;
    thread_local std::vector<bf16_t> tile;
    row.resize(std::max(row.size(), size_t(w.cols)));
    tile.resize(std::max(tile.size(), size_t(kTileRows * w.cols)));
    const int64_t first = task * kTileRows, rows = std::min(kTileRows, w.rows - first);
    if (w.packed != nullptr) {
      unpacked.resize(std::max(unpacked.size(), size_t(kTileRows * w.row_bytes)));
      unpack_rows(w, first, rows, unpacked.data());
    }
    for (int64_t r = 0; r < rows; ++r) {
      dequantize(w.type, w.packed != nullptr ? unpacked.data() + r * w.row_bytes : w.row(first + r), row.data(),
                 w.cols);
      round_row(row.data(), w.cols, tile.data() + r * w.cols);
    }
    const OneOpenMpThread one_thread;
    try {
      product(x16, tile.data(), y + first, tokens, rows, w.cols, y_stride);
    } catch (const dnnl::error&) {
      failed.store(true);
    }
  });
  return !failed.load();
}

}  // namespace

#else

namespace {

bool onednn_multiplies() { return false; }
bool onednn_matmul(const Weight&, const float*, int64_t, float*, int64_t, ThreadPool&) { return false; }

}  // namespace

#endif

namespace {

bool amx_multiplies() {
#if defined(__x86_64__)
  return active_isa() == IsaLevel::kAmx;
#else
  return false;
#endif
}

}  // namespace

bool has_matmul_bf16() { return amx_multiplies() || onednn_multiplies(); }

bool bf16_by_token() { return amx_multiplies(); }

const char* matmul_bf16_name() { return amx_multiplies() ? "bf16 tiles" : "bf16 oneDNN"; }

bool matmul_bf16(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool) {
#if defined(__x86_64__)
  if (amx_multiplies()) {
    matmul_bf16_amx(w, x, tokens, y, y_stride, pool);
    return true;
  }
#endif
  return onednn_matmul(w, x, tokens, y, y_stride, pool);
}

}  // namespace longkv
