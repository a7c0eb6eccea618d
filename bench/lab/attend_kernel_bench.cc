// The attention kernel on one core, without threads: time per row with rows in the nearest caches (arithmetic alone)
// and streaming from memory. Figures are the fastest tenth of many short pieces, so that they hold on a busy machine.
//
// Kept because of what it decided. Zen 3, f16, D=64, group 3: tiles of 64 / 32 / 16 rows stream 14.1 / 15.6 / 13.6
// GB/s; without prefetching 11.8 / 12.1 / 11.4; prefetching a whole tile ahead instead of half of one 13.3 / 14.8
// / 14.0. D=128, group 1: 13.4 / 14.3 / 20.2. Cache levels of the prefetch make no difference.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "base/cpu.h"
#include "kv/attend_kernel.h"
#include "kv/attend_quant.h"
#include "kv/cache.h"
#include "kv/layout.h"

namespace longkv {
namespace {

struct Shape {
  KvType type;
  int dim, group;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Nanoseconds per row over `bytes` of rows, walked `rounds` times in pieces of at most half a megabyte.
double row_time(const Shape& shape, int64_t bytes, int rounds, ThreadPool& pool) {
  const int64_t row_bytes = 2 * kv_row_bytes(shape.type, shape.dim);
  const int64_t piece = std::min<int64_t>(bytes, int64_t(512) << 10) / row_bytes / kAttendTileMax * kAttendTileMax;
  const int64_t rows = bytes / row_bytes / piece * piece;
  KvShape cache_shape;
  cache_shape.layers = cache_shape.kv_heads = 1;
  cache_shape.group_size = shape.group;
  cache_shape.dim_k = cache_shape.dim_v = shape.dim;
  auto cache = KvCache::create(cache_shape, {shape.type, shape.type}, {rows});
  if (!cache.ok()) return 0.0;
  cache->expect_rows(0, {rows});
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(1024) * size_t(shape.dim));
  for (float& f : x) f = normal(engine);
  for (int64_t r = 0; r < rows; r += 1024) {
    if (!cache->append(0, x.data(), x.data(), std::min<int64_t>(1024, rows - r), pool).ok()) return 0.0;
  }
  const int64_t q_stride = (shape.dim + kAttendPad - 1) / kAttendPad * kAttendPad;
  std::vector<float> q(size_t(q_stride * shape.group), 0.05f);
  AttendRun run;
  run.kv = cache->view(0, 0);
  run.q = q.data();
  run.q_stride = q_stride;
  run.n_q = shape.group;
  std::vector<uint8_t> image(size_t(quant_query_bytes(shape.dim) * shape.group));
  if (has_quant_kernels(shape.type)) {
    for (int h = 0; h < shape.group; ++h) {
      prepare_quant_query(shape.type, q.data() + h * q_stride, shape.dim,
                          image.data() + h * quant_query_bytes(shape.dim));
    }
    run.q_image = image.data();
  }
  run.rows = piece;
  run.chunk_rows = 1024;
  run.partial_stride = q_stride + kPartialTail;
  std::vector<float> partials(size_t((piece / run.chunk_rows + 1) * shape.group * run.partial_stride));
  run.partials = partials.data();
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    for (int64_t r = 0; r < rows; r += piece) {
      const RowRange range{r, r + piece};
      run.start = {&range, r};
      const double start = now();
      attend_run(run);
      times.push_back((now() - start) / double(piece));
    }
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 10] * 1e9;
}

}  // namespace
}  // namespace longkv

int main() {
  using namespace longkv;
  ThreadPool pool(1);
  std::printf("%s, %s\n", cpu_model_name().c_str(), isa_name(active_isa()));
  constexpr KvType kTypes[] = {KvType::kF32, KvType::kF16, KvType::kBf16, KvType::kFp8, KvType::kQ8_0, KvType::kQ4_0};
  constexpr int kShapes[][2] = {{64, 1}, {64, 3}, {128, 1}, {128, 4}, {128, 8}, {256, 4}};
  for (const auto& [dim, group] : kShapes) {
    for (KvType type : kTypes) {
      const double bytes = 2.0 * double(kv_row_bytes(type, dim));
      const double cached = row_time({type, dim, group}, int64_t(128) << 10, 400, pool);
      const double streamed = row_time({type, dim, group}, int64_t(96) << 20, 1, pool);
      std::printf("%-5s D=%-3d G=%d  cached %6.2f ns/row  streaming %6.2f ns/row %6.2f GB/s\n", kv_type_name(type), dim,
                  group, cached, streamed, bytes / streamed);
    }
  }
  return 0;
}
