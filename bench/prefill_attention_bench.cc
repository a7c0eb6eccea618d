// Prefill attention in GFLOP/s (scores and values, exponentials not counted) beside oneDNN's f32 matrix product.
//
// Arguments of the attention rows: queries, rows before them, channels, query heads per KV head. Threads:
// LONGKV_THREADS, else every core.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <random>
#include <vector>

#include "base/cpu.h"
#include "base/float16.h"
#include "prefill/attention.h"

#if __has_include(<oneapi/dnnl/dnnl.hpp>)
#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>
#endif

namespace longkv {
namespace {

int bench_threads() {
  const char* text = std::getenv("LONGKV_THREADS");
  return text != nullptr ? std::max(1, std::atoi(text)) : default_threads();
}

std::vector<float> random_floats(int64_t n, float amplitude = 1.0f) {
  std::vector<float> x(static_cast<size_t>(n));
  std::minstd_rand random(7);
  for (float& f : x) f = amplitude * (float(random() % 2001) / 1000.0f - 1.0f);
  return x;
}

void prefill_attention(benchmark::State& state) {
  const int64_t tokens = state.range(0), depth = state.range(1), dim = state.range(2);
  const int group = int(state.range(3));
  const int kv_heads = 2;
  const int64_t rows = depth + tokens;
  std::vector<std::vector<uint16_t>> stored;
  std::vector<KvHeadView> views;
  for (int h = 0; h < kv_heads; ++h) {
    KvHeadView view;
    view.dim_k = view.dim_v = int(dim);
    view.k_stride = view.v_stride = 2 * dim;
    view.rows = rows;
    for (const uint8_t** part : {&view.k, &view.v}) {
      std::vector<uint16_t> bits;
      for (float f : random_floats(rows * dim)) bits.push_back(to_f16(f).bits);
      stored.push_back(std::move(bits));
      *part = reinterpret_cast<const uint8_t*>(stored.back().data());
    }
    views.push_back(view);
  }
  const std::vector<float> q = random_floats(tokens * kv_heads * group * dim, 4.0f);
  std::vector<float> out(q.size());
  ThreadPool pool(bench_threads());
  PrefillAttention attention(pool);
  PrefillAttendArgs args;
  args.q = q.data();
  args.tokens = tokens;
  args.first_position = depth;
  args.heads = views;
  args.group_size = group;
  args.params.scale = 0.125f;
  args.out = out.data();
  for (auto _ : state) attention.run(args);
  const double pairs = double(tokens) * double(depth) + 0.5 * double(tokens) * double(tokens + 1);
  state.counters["GFLOP/s"] =
      benchmark::Counter(4e-9 * pairs * double(dim * kv_heads * group), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(prefill_attention)
    ->ArgNames({"tokens", "depth", "dim", "group"})
    ->ArgsProduct({{512, 2048}, {8192, 32768}, {64}, {3}})
    ->ArgsProduct({{512, 2048}, {8192, 32768}, {128}, {4}})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

#if __has_include(<oneapi/dnnl/dnnl.hpp>)
void onednn_f32_product(benchmark::State& state) {
  const int64_t m = state.range(0), k = state.range(1), n = state.range(2);
  omp_set_num_threads(bench_threads());
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  using Desc = dnnl::memory::desc;
  const Desc a({m, k}, dnnl::memory::data_type::f32, dnnl::memory::format_tag::ab);
  const Desc b({k, n}, dnnl::memory::data_type::f32, dnnl::memory::format_tag::ab);
  const Desc c({m, n}, dnnl::memory::data_type::f32, dnnl::memory::format_tag::ab);
  std::vector<float> x = random_floats(m * k), y = random_floats(k * n), z(static_cast<size_t>(m * n));
  dnnl::matmul product(dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), engine));
  dnnl::memory ma(a, engine, x.data()), mb(b, engine, y.data()), mc(c, engine, z.data());
  for (auto _ : state) {
    product.execute(stream, {{DNNL_ARG_SRC, ma}, {DNNL_ARG_WEIGHTS, mb}, {DNNL_ARG_DST, mc}});
    stream.wait();
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * double(m) * double(k) * double(n), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(onednn_f32_product)
    ->ArgNames({"m", "k", "n"})
    ->Args({2048, 2048, 2048})
    ->Args({512, 1536, 576})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
#endif

}  // namespace
}  // namespace longkv

BENCHMARK_MAIN();
