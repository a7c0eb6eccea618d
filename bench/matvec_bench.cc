// Matrix-vector products: bytes of weights per second by type and shape, beside a plain read loop of the same program.
// Arguments of a row: level, threads. Counter "read" is the share of the plain loop's rate in calls of
// equal size.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/seconds.h"
#include "ops/matmul.h"
#include "ops/packed_rows.h"
#include "quant/block_formats.h"

namespace longkv {
namespace {

struct Shape {
  int64_t rows, cols;
};

// Several copies, so that a pass over all of them finds nothing in the caches, as decode does.
constexpr int64_t kFootprint = 96 << 20;

using Clock = std::chrono::steady_clock;

// Bytes per second of summing `data` as 64-bit words, in calls of `call` bytes shared out in chunks as kernels share
// rows; the least time of every call over several passes.
double read_rate(const std::vector<uint8_t>& data, int64_t call, ThreadPool& pool) {
  const int64_t chunk = std::clamp<int64_t>(call / (8 * pool.threads()), 8 << 10, 128 << 10) / 64 * 64;
  const int64_t calls = int64_t(data.size()) / call;
  const int64_t chunks = call / chunk;
  std::vector<double> least(static_cast<size_t>(calls), 1e30);
  std::vector<uint64_t> sums(static_cast<size_t>(chunks));
  for (int i = 0; i < 15; ++i) {
    for (int64_t j = 0; j < calls; ++j) {
      const auto start = Clock::now();
      pool.run(chunks, [&](int64_t c, int) {
        const auto* p = reinterpret_cast<const uint64_t*>(data.data() + j * call + c * chunk);
        uint64_t s[8] = {};
        for (int64_t k = 0; k < chunk / 8; k += 8) {
          for (int l = 0; l < 8; ++l) s[l] += p[k + l];
        }
        for (uint64_t v : s) sums[size_t(c)] += v;
      });
      least[size_t(j)] = std::min(least[size_t(j)], seconds_since(start));
    }
  }
  benchmark::DoNotOptimize(sums.data());
  double best = 0;
  for (double v : least) best += v;
  return double(calls * chunks * chunk) / best;
}

// Any bytes do for the integer kernels; scales must be small finite halves, so every 16-bit unit is made one.
std::vector<uint8_t> weights(int64_t bytes) {
  std::vector<uint8_t> out(static_cast<size_t>(bytes));
  uint64_t state = 1;
  for (size_t i = 0; i + 8 <= out.size(); i += 8) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t v = (state >> 8) & 0x2fff2fff2fff2fffull;
    std::memcpy(&out[i], &v, 8);
  }
  return out;
}

void run(benchmark::State& state, TensorType type, Shape shape, IsaLevel level, int threads, int tokens, bool f32,
         bool packed) {
  if (!set_active_isa(level).ok()) return state.SkipWithError("level");
  if (packed && !reads_packed(type)) return state.SkipWithError("level");
  ThreadPool pool(threads);
  const TensorTypeInfo& info = *tensor_type_info(type);
  Weight w{type, shape.rows, shape.cols, shape.cols / info.block_values * info.block_bytes, nullptr};
  const int64_t bytes = w.rows * w.row_bytes;
  const int64_t copies = std::max<int64_t>(1, kFootprint / bytes);
  const std::vector<uint8_t> data = weights(bytes * copies);
  std::vector<uint8_t> rearranged(packed ? data.size() : 0);
  for (int64_t c = 0; c < copies && packed; ++c) {
    w.data = data.data() + c * bytes;
    pack_rows(w, rearranged.data() + c * bytes, pool);
  }
  std::vector<float> x(size_t(shape.cols * tokens)), y(size_t(shape.rows * tokens));
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (auto& v : x) v = normal(rng);
  QuantizedRows rows;
  // An output matrix meets second terms of every group, as in Graph::logits.
  const double terms = shape.rows > 32768 ? kFineEverywhere : kFineFrom;
  // The least time of every copy, summed: other programs of the machine disturb some passes but not all.
  std::vector<double> least(static_cast<size_t>(copies), 1e30);
  for (auto _ : state) {
    for (int64_t c = 0; c < copies; ++c) {
      const auto start = Clock::now();
      w.data = data.data() + c * bytes;
      if (packed) w.packed = rearranged.data() + c * bytes;
      if (f32) {
        matvec_f32(w, x.data(), tokens, y.data(), shape.rows, pool);
      } else {
        rows.assign(x.data(), tokens, shape.cols, shape.cols, pool, terms);
        matvec_int8(w, rows, y.data(), shape.rows, pool);
      }
      least[size_t(c)] = std::min(least[size_t(c)], seconds_since(start));
    }
  }
  double best = 0;
  for (double v : least) best += v;
  const double rate = double(bytes * copies) / best;
  state.counters["best_GB/s"] = rate / 1e9;
  state.counters["us/product"] = best / double(copies) * 1e6;
  state.counters["read"] = rate / read_rate(data, bytes, pool);
  (void)set_active_isa(available_isa_levels().back());
}

void register_all() {
  const std::pair<TensorType, bool> kinds[] = {
      {TensorType::kQ4_0, false}, {TensorType::kQ4_1, false},   {TensorType::kQ5_0, false},
      {TensorType::kQ5_1, false}, {TensorType::kQ8_0, false},   {TensorType::kQ2_K, false},
      {TensorType::kQ3_K, false}, {TensorType::kQ4_K, false},   {TensorType::kQ5_K, false},
      {TensorType::kQ6_K, false}, {TensorType::kIQ4_NL, false}, {TensorType::kIQ4_XS, false},
      {TensorType::kF16, true},   {TensorType::kBF16, true},    {TensorType::kF32, true},
      {TensorType::kQ4_1, true},  {TensorType::kQ4_K, true}};
  const Shape shapes[] = {{576, 576}, {1536, 576}, {576, 1536}, {49152, 576}, {4096, 14336}};
  for (IsaLevel level : available_isa_levels()) {
    for (const auto& [type, f32] : kinds) {
      for (Shape s : shapes) {
        if (s.cols % tensor_type_info(type)->block_values != 0) continue;
        for (int threads : {1, default_threads()}) {
          for (int tokens : {1, 4}) {
            for (bool packed : {false, true}) {
              if (packed && (f32 || !reads_packed(type))) continue;
              const std::string name =
                  fmt::format("matvec{}/{}/{}x{}/{}/threads:{}/tokens:{}",
                              f32      ? "_f32"
                              : packed ? "_packed"
                                       : "",
                              tensor_type_info(type)->name, s.rows, s.cols, isa_name(level), threads, tokens);
              benchmark::RegisterBenchmark(name.c_str(), run, type, s, level, threads, tokens, f32, packed)
                  ->Unit(benchmark::kMillisecond)
                  ->UseRealTime();
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace longkv

int main(int argc, char** argv) {
  longkv::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
