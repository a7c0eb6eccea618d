// Index scans per kind and length, and a step's selection beside its attention.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "kv/codec/codec.h"
#include "kv/index/index.h"
#include "kv/session.h"

namespace longkv {
namespace {

std::vector<float> normal(int64_t n) {
  std::mt19937 engine(1);
  std::normal_distribution<float> d;
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = d(engine);
  return v;
}

KvShape shape_of(int kv_heads, int group, int dim) {
  KvShape s;
  s.layers = 1;
  s.kv_heads = kv_heads;
  s.group_size = group;
  s.dim_k = s.dim_v = dim;
  return s;
}

// One KV head, four query heads, one thread. Args: kind, channels, tokens.
void scan(benchmark::State& state) {
  const IndexSpec spec{.kind = IndexKind(state.range(0)), .block = 16, .reps = 2, .coarse = 1};
  const int dim = int(state.range(1));
  const int64_t rows = state.range(2);
  static std::map<std::tuple<int64_t, int64_t, int64_t>, std::unique_ptr<BlockIndex>> cache;
  auto& index = cache[{state.range(0), state.range(1), state.range(2)}];
  if (!index) {
    index = std::move(make_index(spec, shape_of(1, 4, dim), rows)).value();
    const auto keys = normal(4096 * dim);  // the scan's time does not depend on values: the same rows again and again
    KvHeadView view;
    view.k_type = view.v_type = KvType::kF32;
    view.dim_k = view.dim_v = dim;
    view.k_stride = view.v_stride = kv_row_bytes(KvType::kF32, dim);
    view.rows = rows;
    for (int64_t r = 0; r < rows; r += 4096) {
      view.k = reinterpret_cast<const uint8_t*>(keys.data()) - r * view.k_stride;
      index->append(0, view, r, std::min(rows, r + 4096));
    }
  }
  const auto q = normal(4 * dim);
  const int64_t blocks = index->blocks(0);
  std::vector<float> scores(size_t(4 * blocks));
  for (auto _ : state) {
    for (int64_t b = 0; b < blocks; b += 1024) {
      index->score(0, q.data(), 4, b, std::min(blocks, b + 1024), scores.data() + b, blocks);
    }
    benchmark::DoNotOptimize(scores.data());
  }
  state.SetBytesProcessed(state.iterations() * index->bytes_scored(blocks));
  state.counters["ns/block"] = benchmark::Counter(
      double(blocks) * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
  state.SetLabel(index_kind_name(spec.kind));
}
BENCHMARK(scan)
    ->ArgsProduct({{int(IndexKind::kMean), int(IndexKind::kMinMax), int(IndexKind::kFixed), int(IndexKind::kBits)},
                   {64, 128},
                   {8192, 131072, 1048576}})
    ->Unit(benchmark::kMicrosecond);

// A decode step of one layer at a depth over random rows, one thread: microseconds of choosing and of attention, the
// tail included, of the fastest of some hundred steps, since other programs only ever add to them. Args: recipe,
// channels, tokens.
constexpr const char* kRecipes[] = {
    "full",
    "quest:dense_layers=0",
    "quest:dense_layers=0,coarse=1",
    "quest:dense_layers=0,summary=f16",
    "quest:dense_layers=0,index=meandev",
    "quest:dense_layers=0,index=mean",
    "onebit",
    "onebit:pool=max",
    "onebit:coarse=0",
    "onebit:block=1",
    "onebit:refine=exact",
    "sparq",
    "double_sparsity",
    "twilight:dense_layers=0",
    "magicpig:dense=9",
    "retroinfer",
    "vattention:epsilon=0",
};

void step(benchmark::State& state) {
  const int dim = int(state.range(1));
  const int64_t rows = state.range(2);
  const KvShape shape = shape_of(2, 4, dim);
  const auto recipe = parse_recipe(kRecipes[state.range(0)]);
  if (!recipe.ok()) return state.SkipWithError(recipe.status().message().c_str());
  ThreadPool pool(1);
  auto session =
      std::move(KvSession::create(shape, *recipe, {rows + 4096}, {1.0f / std::sqrt(float(dim)), 0.0f}, pool)).value();
  if (!session->fill_random(rows, 1).ok()) return state.SkipWithError("fill_random failed");
  const auto q = normal(8 * dim), kv = normal(2 * dim);
  std::vector<float> out(size_t(8 * dim));
  for (int i = 0; i < 3; ++i) (void)session->decode(0, q.data(), kv.data(), kv.data(), out.data());
  double select = 1e9, attend = 1e9, index_bytes = 0, kv_bytes = 0;  // seconds of the fastest steps
  for (auto _ : state) {
    session->reset_stats();
    if (!session->decode(0, q.data(), kv.data(), kv.data(), out.data()).ok())
      return state.SkipWithError("decode failed");
    const KvStats& stats = session->stats();
    select = std::min(select, stats.seconds_select);
    attend = std::min(attend, stats.seconds_attend);
    index_bytes = double(stats.index_bytes);
    kv_bytes = double(stats.kv_bytes);
  }
  state.counters["select_us"] = select * 1e6;
  state.counters["attend_us"] = attend * 1e6;
  state.counters["select/attend"] = select / attend;
  state.counters["index_KB"] = index_bytes / 1024;
  state.counters["kv_KB"] = kv_bytes / 1024;
  state.SetLabel(kRecipes[state.range(0)]);
}
BENCHMARK(step)
    ->ArgsProduct({benchmark::CreateDenseRange(0, int64_t(std::size(kRecipes)) - 1, 1), {64, 128}, {32768, 131072}})
    ->Iterations(300)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace longkv

BENCHMARK_MAIN();
