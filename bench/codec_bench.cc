// Decode attention per encoding of rows, on one core: rows per second and encoded bytes per second against f16, with
// the rows in the nearest caches (arithmetic alone) and streaming from memory. Encodings are measured in turns and the
// best of many short rounds counts, so that ratios hold on a busy machine. Usage: codec_bench [seconds per shape]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "base/cpu.h"
#include "kv/attend.h"
#include "kv/cache.h"
#include "kv/layout.h"

namespace longkv {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

constexpr KvType kTypes[] = {KvType::kF16, KvType::kFp8, KvType::kQ8_0, KvType::kQ4_0, KvType::kKivi4, KvType::kKivi2};

struct Head {
  KvType type;
  std::vector<KvCache> cache;  // one
  RowRange rows;
  double best = 1e9;
};

Head make_head(KvType type, int dim, int group, int64_t rows, ThreadPool& pool) {
  KvShape shape;
  shape.layers = shape.kv_heads = 1;
  shape.group_size = group;
  shape.dim_k = shape.dim_v = dim;
  Head head{type, {}, {0, rows}};
  const bool blocked = kv_type_blocked(type);
  auto cache = KvCache::create(shape, blocked ? KvTypes{} : KvTypes{type, type}, {rows});
  if (!cache.ok()) return head;
  head.cache.push_back(std::move(*cache));
  KvCache& c = head.cache[0];
  if (blocked) {
    RegionSpec spec;
    spec.k = spec.v = type;
    auto regions = RegionStore::create(shape, std::move(spec), {rows});
    if (!regions.ok() || !c.add_regions(std::move(*regions)).ok()) return head;
  } else {
    c.expect_rows(0, {rows});
  }
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(1024) * size_t(dim));
  for (float& f : x) f = normal(engine);
  for (int64_t r = 0; r < rows; r += 1024) {
    if (!c.append(0, x.data(), x.data(), std::min<int64_t>(1024, rows - r), pool).ok()) return head;
    c.encode_old(0, pool);
  }
  return head;
}

void run_shape(int dim, int group, bool streaming, double seconds, ThreadPool& pool) {
  // In the nearest caches: f16 rows take 256 KiB at dim 128. Streaming: pieces that no cache holds, walked in turns.
  const int64_t rows = streaming ? (int64_t(128) << 20) / (4 * dim) : 512;
  const int64_t piece = streaming ? 4096 : rows;
  std::vector<Head> heads;
  for (const KvType type : kTypes) heads.push_back(make_head(type, dim, group, rows, pool));
  std::vector<float> q(size_t(dim * group), 0.05f), out(q.size()), lse(static_cast<size_t>(group));
  AttendScratch scratch;
  const AttendParams params{0.1f, 0.0f};
  const double end = now() + seconds;
  for (int64_t at = 0; now() < end; at = at + piece < rows ? at + piece : 0) {
    for (Head& head : heads) {
      const RowRange range{at, std::min(rows, at + piece)};
      AttendUnit unit{q.data(), group, head.cache[0].view(0, 0), {&range, 1}, out.data(), lse.data()};
      const double start = now();
      attend({&unit, 1}, params, scratch, pool);
      head.best = std::min(head.best, (now() - start) / double(count_of(range)));
    }
  }
  for (const Head& head : heads) {
    const double bytes = 2.0 * double(kv_row_bytes(head.type, dim)), f16 = 4.0 * dim;
    std::printf("%-6s D=%-3d G=%d %-9s %6.2f ns/row %7.1f Mrows/s %6.2f GB/s  x%.2f of f16 (bytes x%.2f)\n",
                kv_type_name(head.type), dim, group, streaming ? "streaming" : "cached", head.best * 1e9,
                1e-6 / head.best, bytes / head.best * 1e-9, heads[0].best / head.best, f16 / bytes);
  }
}

}  // namespace
}  // namespace longkv

int main(int argc, char** argv) {
  using namespace longkv;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2.0;
  ThreadPool pool(1);
  std::printf("%s, %s\n", cpu_model_name().c_str(), isa_name(active_isa()));
  constexpr int kShapes[][2] = {{64, 1}, {64, 3}, {128, 1}, {128, 4}, {256, 4}};
  for (const auto& [dim, group] : kShapes) {
    for (bool streaming : {false, true}) run_shape(dim, group, streaming, seconds, pool);
  }
  return 0;
}
