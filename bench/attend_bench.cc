// Decode attention against the read bandwidth of the machine: full and block-sparse, per KV type, shape and group.
//
// Every row prints KV bytes per second and their share of a plain read loop's rate, measured right before and after it
// in this process, since other tenants of the machine come and go. Usage: attend_bench [threads]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "base/bandwidth.h"
#include "base/cpu.h"
#include "kv/attend.h"
#include "kv/cache.h"
#include "kv/layout.h"

namespace longkv {
namespace {

struct Case {
  const char* name;
  KvType k, v;
  int dim, group, kv_heads, layers;
  int64_t rows;
  int64_t budget;  // 0: all rows, else rows in blocks of 16
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void run_case(const Case& c, ThreadPool& pool) {
  KvShape shape;
  shape.layers = c.layers;
  shape.kv_heads = c.kv_heads;
  shape.group_size = c.group;
  shape.dim_k = shape.dim_v = c.dim;
  auto cache = KvCache::create(shape, {c.k, c.v}, {c.rows});
  if (!cache.ok()) {
    std::printf("%s\n", cache.status().message().c_str());
    return;
  }
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  const int64_t n = 1024;
  std::vector<float> x(size_t(n * c.kv_heads * c.dim));
  for (float& f : x) f = normal(engine);
  for (int layer = 0; layer < c.layers; ++layer) {
    cache->expect_rows(layer, {c.rows});
    for (int64_t r = 0; r < c.rows; r += n) {
      if (!cache->append(layer, x.data(), x.data(), std::min(n, c.rows - r), pool).ok()) return;
    }
  }
  std::vector<float> q(size_t(c.kv_heads * c.group * c.dim));
  for (float& f : q) f = normal(engine);
  std::vector<float> out(q.size()), lse(size_t(c.kv_heads * c.group));

  // Per layer and KV head its own rows, as selection would have it.
  std::vector<std::vector<RowRange>> ranges(size_t(c.layers * c.kv_heads));
  double bytes = 0.0;
  for (auto& list : ranges) {
    if (c.budget == 0) {
      list = {{0, c.rows}};
    } else {
      std::vector<int64_t> blocks(size_t(blocks_for(c.rows, 16))), chosen;
      for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = int64_t(i);
      std::sample(blocks.begin(), blocks.end(), std::back_inserter(chosen), c.budget / 16, engine);
      ranges_of_blocks(chosen, 16, 0, c.rows, list);
    }
    bytes += double(count_rows(list)) * double(kv_row_bytes(c.k, c.dim) + kv_row_bytes(c.v, c.dim));
  }

  AttendScratch scratch;
  const AttendParams params{1.0f / std::sqrt(float(c.dim)), 0.0f};
  const auto step = [&] {
    for (int layer = 0; layer < c.layers; ++layer) {
      std::vector<AttendUnit> units;
      for (int h = 0; h < c.kv_heads; ++h) {
        units.push_back({q.data() + h * c.group * c.dim, c.group, cache->view(layer, h),
                         ranges[size_t(layer * c.kv_heads + h)], out.data() + h * c.group * c.dim,
                         lse.data() + h * c.group});
      }
      attend(units, params, scratch, pool);
    }
  };
  step();
  std::vector<double> seconds, shares;
  for (int round = 0; round < 5; ++round) {
    const auto before = measure_read_bandwidth(pool, size_t(128) << 20, 3);
    double best = 1e9;
    // Sparse reads of one set of blocks stay in the last-level cache when repeated: only the first read counts, and the
    // read test before it has flushed them.
    const int repeats = c.budget == 0 ? std::max(1, int(1.5e9 / bytes)) : 1;
    const double start = now();
    for (int i = 0; i < repeats; ++i) step();
    best = std::min(best, (now() - start) / repeats);
    seconds.push_back(best);
    if (before.ok()) shares.push_back(bytes / best * 1e-9 / before->best);
  }
  std::sort(seconds.begin(), seconds.end());
  std::sort(shares.begin(), shares.end());
  std::printf(
      "%-22s %5s/%-5s D=%-4d G=%d rows=%-7ld %-7s %8.3f ms  %6.2f GB/s (best %6.2f)  share %5.1f%% (best %5.1f%%)\n",
      c.name, kv_type_name(c.k), kv_type_name(c.v), c.dim, c.group, long(c.rows), c.budget ? "sparse" : "full",
      seconds[seconds.size() / 2] * 1e3, bytes / seconds[seconds.size() / 2] * 1e-9, bytes / seconds[0] * 1e-9,
      100.0 * shares[shares.size() / 2], 100.0 * shares.back());
  std::fflush(stdout);
}

}  // namespace
}  // namespace longkv

int main(int argc, char** argv) {
  using namespace longkv;
  const int threads = argc > 1 ? std::atoi(argv[1]) : default_threads();
  ThreadPool pool(std::max(threads, 1));
  const auto bandwidth = measure_read_bandwidth(pool, size_t(512) << 20);
  if (!bandwidth.ok()) return 1;
  std::printf("%s, %s, %d threads, read %.2f GB/s (median %.2f)\n", cpu_model_name().c_str(), isa_name(active_isa()),
              threads, bandwidth->best, bandwidth->median);
  constexpr KvType kTypes[] = {KvType::kF32, KvType::kF16, KvType::kBf16, KvType::kFp8, KvType::kQ8_0, KvType::kQ4_0};
  for (KvType t : kTypes) run_case({"needle-10m 32K", t, t, 64, 3, 2, 6, 32768, 0}, pool);
  for (KvType t : {KvType::kF16, KvType::kQ8_0, KvType::kQ4_0}) {
    run_case({"llama 128", t, t, 128, 4, 8, 2, 16384, 0}, pool);
    run_case({"gemma 256", t, t, 256, 4, 1, 8, 16384, 0}, pool);
  }
  for (int group : {1, 2, 4, 5, 6, 7, 8}) {
    run_case({"groups", KvType::kF16, KvType::kF16, 128, group, 4, 4, 16384, 0}, pool);
  }
  for (KvType t : {KvType::kF16, KvType::kQ8_0}) {
    run_case({"needle-10m 2K of 32K", t, t, 64, 3, 2, 6, 32768, 2048}, pool);
    run_case({"needle-10m 2K of 128K", t, t, 64, 3, 2, 6, 131072, 2048}, pool);
    run_case({"llama 2K of 64K", t, t, 128, 4, 8, 2, 65536, 2048}, pool);
  }
  return 0;
}
