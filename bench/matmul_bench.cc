// Prompt products of every weight type beside oneDNN's int8 (u8 x s8, f32 result), f32 and bf16 on the same shapes.
//
//   matmul_bench [threads] [seconds per shape] [substring of a type name] [number of shapes] [level]
//
// Contestants take turns and each reports its fastest turn, so that other load on the machine hits all alike; with one
// thread the time is CPU time of the process. GOPS = 2 * tokens * rows * cols / time, decoding of the weights included.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/cpu.h"
#include "ops/matmul.h"
#include "ops/matmul_bf16.h"
#include "ops/matmul_f32.h"
#include "quant/tensor_type.h"

#ifdef LONGKV_WITH_ONEDNN
#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>
#endif

namespace longkv {
namespace {

struct Shape {
  int64_t tokens, rows, cols;
};

struct Contestant {
  std::string name;
  std::function<void()> run;
  double seconds = 1e30;
};

struct Operands {
  std::vector<float> x, y;
  QuantizedRows rows;
  std::vector<std::vector<uint8_t>> weights;
};

#ifdef LONGKV_WITH_ONEDNN
Contestant onednn(const Shape& s, ProductType product, int threads) {
  using dnnl::memory;
  using Type = memory::data_type;
  using Tag = memory::format_tag;
  struct State {
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream{engine};
    memory src, weights, dst;
    dnnl::matmul product;
  };
  auto state = std::make_shared<State>();
  const bool int8 = product == ProductType::kInt8;
  const Type floats = product == ProductType::kBf16 ? Type::bf16 : Type::f32;
  const memory::desc src({s.tokens, s.cols}, int8 ? Type::u8 : floats, Tag::ab);
  const memory::desc any({s.cols, s.rows}, int8 ? Type::s8 : floats, Tag::any);
  const memory::desc dst({s.tokens, s.rows}, Type::f32, Tag::ab);
  omp_set_num_threads(threads);
  const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(src, any, dst), state->engine);
  state->src = memory(src, state->engine);
  state->weights = memory(description.weights_desc(), state->engine);
  state->dst = memory(dst, state->engine);
  state->product = dnnl::matmul(description);
  return {int8                   ? "oneDNN int8"
          : floats == Type::bf16 ? "oneDNN bf16"
                                 : "oneDNN f32",
          [state, threads] {
            omp_set_num_threads(threads);
            state->product.execute(
                state->stream,
                {{DNNL_ARG_SRC, state->src}, {DNNL_ARG_WEIGHTS, state->weights}, {DNNL_ARG_DST, state->dst}});
            state->stream.wait();
          }};
}
#endif

double now(int threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

void bench(const Shape& s, int threads, double seconds, const std::string& filter) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  ThreadPool pool(threads);
  Operands o;
  o.x.resize(size_t(s.tokens * s.cols));
  o.y.resize(size_t(s.tokens * s.rows));
  for (float& v : o.x) v = normal(random);
  o.rows.assign(o.x.data(), s.tokens, s.cols, s.cols, pool);
  std::vector<Contestant> all;
#ifdef LONGKV_WITH_ONEDNN
  all.push_back(onednn(s, ProductType::kInt8, threads));
  all.push_back(onednn(s, ProductType::kF32, threads));
  if (has_matmul_bf16()) all.push_back(onednn(s, ProductType::kBf16, threads));
#endif
  for (TensorType type :
       {TensorType::kQ4_0, TensorType::kQ4_1, TensorType::kQ5_0, TensorType::kQ5_1, TensorType::kQ8_0,
        TensorType::kQ2_K, TensorType::kQ3_K, TensorType::kQ4_K, TensorType::kQ5_K, TensorType::kQ6_K,
        TensorType::kIQ4_NL, TensorType::kIQ4_XS, TensorType::kF32, TensorType::kF16, TensorType::kBF16}) {
    const TensorTypeInfo& info = *tensor_type_info(type);
    if (s.cols % info.block_values != 0 || std::string(info.name).find(filter) == std::string::npos) continue;
    const int64_t bytes = s.cols / info.block_values * info.block_bytes;
    o.weights.emplace_back(size_t(s.rows * bytes));
    // Small bytes are small, finite numbers in every format.
    for (uint8_t& b : o.weights.back()) b = uint8_t(random() % 60);
    if (type == TensorType::kF32 || type == TensorType::kBF16) {  // but subnormal ones take the processor's slow path
      for (size_t i = size_t(info.block_bytes) - 1; i < o.weights.back().size(); i += size_t(info.block_bytes)) {
        o.weights.back()[i] = 0x3f;
      }
    }
    const Weight w{type, s.rows, s.cols, bytes, o.weights.back().data()};
    if (has_int8_form(type)) {
      all.push_back({info.name, [&o, &pool, w] { matmul_int8(w, o.rows, o.y.data(), w.rows, pool); }});
    } else {
      all.push_back({std::string(info.name) + " fp32",
                     [&o, &pool, w, n = s.tokens] { matmul_f32(w, o.x.data(), n, o.y.data(), w.rows, pool); }});
    }
    if (has_matmul_bf16()) {
      all.push_back({std::string(info.name) + " bf16",
                     [&o, &pool, w, n = s.tokens] { (void)matmul_bf16(w, o.x.data(), n, o.y.data(), w.rows, pool); }});
    }
  }
  const double start = now(threads);
  for (int round = 0; round < 2 || now(threads) - start < seconds; ++round) {
    for (Contestant& c : all) {
      const double begin = now(threads);
      c.run();
      c.seconds = std::min(c.seconds, now(threads) - begin);
    }
  }
  fmt::print("\n{} tokens, {} x {}, {} thread(s), {}\n", s.tokens, s.rows, s.cols, threads, isa_name(active_isa()));
  const double operations = 2.0 * double(s.tokens) * double(s.rows) * double(s.cols);
  for (const Contestant& c : all) {
    fmt::print("  {:<14} {:8.1f} GOPS", c.name, operations / c.seconds * 1e-9);
#ifdef LONGKV_WITH_ONEDNN
    fmt::print("  {:5.2f} of oneDNN int8  {:5.2f} of oneDNN f32", all[0].seconds / c.seconds,
               all[1].seconds / c.seconds);
#endif
    fmt::print("\n");
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace longkv

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : longkv::default_threads();
  const double seconds = argc > 2 ? std::atof(argv[2]) : 5.0;
  const std::string filter = argc > 3 ? argv[3] : "";
  const size_t shapes = argc > 4 ? size_t(std::atoi(argv[4])) : 99;
  if (argc > 5) {
    const auto level = longkv::parse_isa(argv[5]);
    if (!level || !longkv::set_active_isa(*level).ok()) {
      fmt::print(stderr, "no level '{}' here\n", argv[5]);
      return 2;
    }
  }
  size_t done = 0;
  for (const longkv::Shape& s :
       {longkv::Shape{512, 576, 576}, longkv::Shape{512, 192, 576}, longkv::Shape{512, 1536, 576},
        longkv::Shape{512, 576, 1536}, longkv::Shape{2048, 1536, 576}, longkv::Shape{2048, 4096, 4096}}) {
    if (done++ < shapes) longkv::bench(s, threads, seconds, filter);
  }
  return 0;
}
