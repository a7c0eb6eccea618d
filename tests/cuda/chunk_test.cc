// Learning on the card: products, attention of a chunk and its gradient against double precision and against the CPU.
#include "cuda/chunk.h"

#include <algorithm>
#include <cmath>

#include "cuda/card.h"
#include "cuda/channel_gram.h"
#include "cuda/chunk_attend.h"
#include "kv/layout.h"

namespace longkv {
namespace {

using test::normal_floats;
using test::OnCard;

double norm_of(std::span<const float> x) {
  double sum = 0;
  for (float v : x) sum += double(v) * v;
  return std::sqrt(sum);
}
double distance(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double(a[i]) - b[i], 2);
  return std::sqrt(sum);
}

TEST(CardProducts, EveryOrderOfOperands) {
  LONGKV_NEED_CARD();
  CardMemory memory(0);
  auto gemm = std::move(CardGemm::create(memory)).value();
  const int64_t sizes[][3] = {{1, 1, 1}, {7, 64, 33}, {64, 129, 96}, {256, 65, 2049}, {3, 500, 7}};
  for (const auto& [m, n, k] : sizes) {
    for (int form = 0; form < 16; ++form) {
      const bool a_turned = form & 1, b_turned = form & 2, halves = form & 4, add = form & 8;
      SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", form " << form);
      const int64_t batch = halves ? 1 : 3, skip = halves ? 8 : 1;  // operands that lie badly
      const int64_t a_stride = (a_turned ? m : k) + skip, b_stride = (b_turned ? k : n) + skip, c_stride = n + 3;
      const int64_t a_step = (a_turned ? k : m) * a_stride, b_step = (b_turned ? n : k) * b_stride,
                    c_step = m * c_stride + 1;
      const auto a = normal_floats(batch * a_step + skip, 1), b = normal_floats(batch * b_step + skip, 2),
                 c = normal_floats(batch * c_step + 1, 3);
      const OnCard on_a = halves ? OnCard::of(test::to_halves(a)) : OnCard::of(a);
      const OnCard on_b = halves ? OnCard::of(test::to_halves(b)) : OnCard::of(b);
      const OnCard on_c = OnCard::of(c);
      CardProduct p{m, n, k, a_turned, b_turned, a_stride, b_stride, c_stride, batch, a_step, b_step, c_step};
      p.halves = halves;
      p.add = add;
      const int64_t bytes = halves ? 2 : 4;
      ASSERT_DONE(gemm->run(p, on_a.data() + skip * bytes, on_b.data() + skip * bytes, on_c.as<float>() + 1, nullptr));
      const auto have = on_c.read<float>(int64_t(c.size()));
      const auto value = [&](const std::vector<float>& x, int64_t at) {
        const float v = x[size_t(at + skip)];
        return double(halves ? to_float(to_f16(v)) : v);
      };
      double error = 0, size = 0;
      std::vector<float> untouched = have;
      for (int64_t i = 0; i < batch; ++i) {
        for (int64_t r = 0; r < m; ++r) {
          for (int64_t col = 0; col < n; ++col) {
            double sum = 0, magnitude = 0;
            for (int64_t l = 0; l < k; ++l) {
              const double x = value(a, i * a_step + (a_turned ? l * a_stride + r : r * a_stride + l));
              const double y = value(b, i * b_step + (b_turned ? col * b_stride + l : l * b_stride + col));
              sum += x * y;
              magnitude += std::abs(x * y);
            }
            const auto at = size_t(1 + i * c_step + r * c_stride + col);
            if (add) sum += c[at];
            error = std::max(error, std::abs(have[at] - sum));
            size = std::max(size, magnitude + std::abs(double(c[at])));
            untouched[at] = c[at];
          }
        }
      }
      EXPECT_LE(error, 2e-6 * size);
      EXPECT_EQ(untouched, c) << "something else was written";
    }
  }
}

TEST(CardChunk, PairsOfHalvesKeepTheDigits) {
  LONGKV_NEED_CARD();
  for (int64_t n : {1, 63, 64, 1000, 14336}) {
    const int64_t rows = 5;
    std::vector<float> x = normal_floats(rows * n, 4);
    const float sizes[] = {1.0f, 1e-12f, 3e9f, 0.0f, 1e-38f};
    for (int64_t i = 0; i < rows * n; ++i) x[size_t(i)] *= sizes[i / n];
    const OnCard on = OnCard::of(x), halves(2 * rows * n * 2), scale(rows * 4), out(rows * n * 4);
    ASSERT_DONE(card::split_rows(on.as<float>(), rows, n, halves.as<card::half_t>(), scale.as<float>(), nullptr));
    const auto pairs = halves.read<uint16_t>(2 * rows * n);
    std::vector<float> y;
    for (uint16_t h : pairs) y.push_back(test::half_float(h));
    const OnCard wide = OnCard::of(y);
    ASSERT_DONE(card::join_rows(wide.as<float>(), scale.as<float>(), rows, n, out.as<float>(), nullptr));
    const auto back = out.read<float>(rows * n);
    for (int64_t r = 0; r < rows; ++r) {
      float top = 0;
      for (int64_t i = 0; i < n; ++i) top = std::max(top, std::abs(x[size_t(r * n + i)]));
      for (int64_t i = 0; i < n; ++i) {
        // Numbers below 2^-126 have fewer digits themselves.
        ASSERT_NEAR(back[size_t(r * n + i)], x[size_t(r * n + i)], double(top) * 0x1p-21 + 1e-44) << r << ", " << i;
      }
    }
  }
}

struct Shape {
  int group, dim;
  int64_t tokens, prompt;
  RowRange middle;
  int64_t window;
  bool mixed, compensate, heads, without;
  int64_t score_bytes;
};

// A chunk behind random rows, and all that its attention reads.
struct Scene {
  static constexpr int kHeads = 4;
  Shape shape;
  std::vector<float> keys, values, q, k, v, mix;
  std::vector<OldHead> heads;
  ChunkAttention a;

  explicit Scene(const Shape& s) : shape(s) {
    const int64_t dim = s.dim, behind = 5;
    keys = normal_floats(kHeads * (s.prompt + behind) * dim, 1);
    values = normal_floats(kHeads * (s.prompt + behind) * dim, 2);
    q = normal_floats(s.tokens * kHeads * s.group * dim, 3);
    k = normal_floats(s.tokens * kHeads * dim, 4);
    v = normal_floats(s.tokens * kHeads * dim, 5);
    mix = normal_floats(kHeads * dim * dim, 6, 0.03f);
    for (int64_t i = 0; i < kHeads * dim; ++i) mix[size_t(i * dim + i % dim)] += 0.7f;
    // One head of each kind.
    heads = {{false, RemovedAs::kMean, 0},
             {true, RemovedAs::kMean, 0},
             {true, RemovedAs::kConstant, 0.4f},
             {true, RemovedAs::kDrop, 0}};
    a.kv_heads = kHeads;
    a.group = s.group;
    a.dim_k = a.dim_v = s.dim;
    a.scale = 1.0f / std::sqrt(float(s.dim));
    a.window = s.window;
    for (int h = 0; h < kHeads; ++h) {
      KvHeadView view;
      view.k_type = view.v_type = KvType::kF32;
      view.dim_k = view.dim_v = s.dim;
      view.k = reinterpret_cast<const uint8_t*>(keys.data() + h * (s.prompt + behind) * dim);
      view.v = reinterpret_cast<const uint8_t*>(values.data() + h * (s.prompt + behind) * dim);
      view.k_stride = view.v_stride = dim * 4;
      view.rows = s.prompt;
      a.prompt.push_back(view);
    }
    a.held = s.prompt + behind;
    a.middle = s.middle;
    a.mix = s.mixed ? mix.data() : nullptr;
    a.compensate = s.compensate;
    if (s.heads) a.heads = heads;
    a.without_middle = s.without;
    a.tokens = s.tokens;
    a.q = q.data();
    a.k = k.data();
    a.v = v.data();
  }
};

// The definition, in double: what the header of grad/chunk_attention.h says. Moves: what is added to inputs, times
// `step`, for differences.
struct Moves {
  const std::vector<float>*q = nullptr, *k = nullptr, *v = nullptr, *mix = nullptr;
  double step = 0;
};
void attend_in_double(const Scene& s, const Moves& moves, std::vector<double>& out, std::vector<double>& lse) {
  const ChunkAttention& a = s.a;
  const int64_t dim = a.dim_k, rows = s.shape.prompt;
  const auto moved = [&](const std::vector<float>& x, const std::vector<float>* by, int64_t at) {
    return double(x[size_t(at)]) + (by == nullptr ? 0.0 : moves.step * (*by)[size_t(at)]);
  };
  out.assign(s.q.size(), 0.0);
  lse.assign(s.q.size() / size_t(dim), 0.0);
  for (int h = 0; h < a.kv_heads; ++h) {
    const OldHead head = a.heads.empty() ? OldHead{} : a.heads[size_t(h)];
    const auto key = [&](int64_t r, int64_t c) {
      return r < rows ? double(s.keys[size_t((h * a.held + r) * dim + c)])
                      : moved(s.k, moves.k, ((r - rows) * a.kv_heads + h) * dim + c);
    };
    const auto value = [&](int64_t r, int64_t c) {
      return r < rows ? double(s.values[size_t((h * a.held + r) * dim + c)])
                      : moved(s.v, moves.v, ((r - rows) * a.kv_heads + h) * dim + c);
    };
    std::vector<double> mean(size_t(dim), 0.0);
    for (int64_t r = a.middle.begin; r < a.middle.end; ++r) {
      for (int64_t c = 0; c < dim; ++c) mean[size_t(c)] += key(r, c) / double(count_of(a.middle));
    }
    for (int64_t i = 0; i < a.tokens * a.group; ++i) {
      const int64_t t = i / a.group, at = (t * a.kv_heads + h) * a.group + i % a.group;
      std::vector<double> q(static_cast<size_t>(dim)), old(size_t(dim), 0.0);
      for (int64_t c = 0; c < dim; ++c) q[size_t(c)] = moved(s.q, moves.q, at * dim + c) * double(a.scale);
      for (int64_t c = 0; c < dim; ++c) {
        for (int64_t e = 0; e < dim && a.mix != nullptr; ++e) {
          old[size_t(e)] += q[size_t(c)] * moved(s.mix, moves.mix, (h * dim + c) * dim + e);
        }
        if (a.mix == nullptr) old[size_t(c)] = q[size_t(c)];
      }
      std::vector<std::pair<int64_t, double>> scores;
      const RowRange seen = visible_rows(rows + t, a.window);
      for (int64_t r = seen.begin; r < seen.end; ++r) {
        double score = 0;
        if (r >= a.middle.begin && r < a.middle.end) {
          if (a.without_middle || (head.removed && head.as == RemovedAs::kDrop)) continue;
          for (int64_t c = 0; c < dim; ++c) {
            const double by_mean = q[size_t(c)] * mean[size_t(c)];
            if (head.removed) {
              score += head.as == RemovedAs::kMean ? by_mean : 0.0;
            } else {
              score += old[size_t(c)] * key(r, c) + (a.compensate ? by_mean - old[size_t(c)] * mean[size_t(c)] : 0.0);
            }
          }
          if (head.removed && head.as == RemovedAs::kConstant) score = head.score;
        } else {
          for (int64_t c = 0; c < dim; ++c) score += q[size_t(c)] * key(r, c);
        }
        scores.emplace_back(r, score);
      }
      double top = -1e300, sum = 0;
      for (const auto& [r, x] : scores) top = std::max(top, x);
      for (const auto& [r, x] : scores) sum += std::exp(x - top);
      for (const auto& [r, x] : scores) {
        const double p = std::exp(x - top) / sum;
        for (int64_t c = 0; c < dim; ++c) out[size_t(at * dim + c)] += p * value(r, c);
      }
      lse[size_t(at)] = top + std::log(sum);
    }
  }
}

struct Found {
  std::vector<float> out, lse, dq, dk, dv, dmix, dprompt;
};

template <class Attend, class Backward>
Found run(const Scene& s, bool prompt_too, const std::vector<float>& dout, const Attend& attend,
          const Backward& backward) {
  Found f;
  f.out.assign(s.q.size(), 0.0f);
  f.lse.assign(s.q.size() / size_t(s.shape.dim), 0.0f);
  f.dq.assign(s.q.size(), 0.0f);
  f.dk.assign(s.k.size(), 0.0f);
  f.dv.assign(s.v.size(), 0.0f);
  f.dmix.assign(s.mix.size(), 0.5f);  // added to
  if (prompt_too) f.dprompt.assign(size_t(Scene::kHeads * s.shape.prompt * s.shape.dim), -1.0f);
  attend(f.out.data(), f.lse.data());
  backward(f.out.data(), f.lse.data(), dout.data(),
           ChunkAttentionGradient{f.dq.data(), f.dk.data(), f.dv.data(), f.dmix.data(),
                                  prompt_too ? f.dprompt.data() : nullptr});
  for (float& x : f.dmix) x -= 0.5f;
  return f;
}

TEST(CardChunk, AttentionAndItsGradient) {
  LONGKV_NEED_CARD();
  constexpr int64_t kAll = CardChunkAttention::kScoreBytes;
  const Shape shapes[] = {
      {1, 64, 1, 0, {}, 0, false, false, false, false, kAll},
      {1, 64, 1, 1, {}, 0, false, false, false, false, kAll},
      {3, 96, 7, 63, {4, 36}, 0, true, false, false, false, kAll},
      {4, 128, 64, 65, {1, 33}, 0, true, true, false, false, kAll},
      {3, 64, 7, 257, {5, 229}, 0, true, true, true, false, kAll},
      {3, 64, 7, 257, {5, 229}, 0, true, false, true, false, 1},  // 64 rows at a time
      {4, 256, 7, 128, {0, 96}, 0, true, true, true, false, 1},
      {1, 128, 64, 300, {16, 208}, 0, false, true, false, true, 1},  // as the streaming branch
      {4, 96, 64, 129, {}, 50, false, false, false, false, 1},       // a window that ends within the chunk
      {3, 128, 7, 200, {}, 3, false, false, false, false, kAll},
      {1, 64, 7, 500, {}, 0, false, false, false, false, 1},
      {4, 64, 1, 640, {32, 512}, 0, true, true, false, false, 1},
  };
  ThreadPool pool(4);
  CardMemory memory(0);
  auto gemm = std::move(CardGemm::create(memory)).value();
  auto stream = std::move(CardStream::create()).value();
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(testing::Message() << "group " << shape.group << ", dim " << shape.dim << ", " << shape.tokens
                                    << " tokens behind " << shape.prompt << ", mixed " << shape.mixed << ", heads "
                                    << shape.heads << ", window " << shape.window);
    const Scene s(shape);
    const auto dout = normal_floats(int64_t(s.q.size()), 7);
    const bool prompt_too = count_of(shape.middle) == 0 && shape.window == 0 && shape.prompt > 0;
    CardPromptRows rows(memory, stream.get(), pool);
    CardChunkAttention attention(rows, *gemm, stream.get(), pool, shape.score_bytes);
    const auto on_card = [&] {
      return run(
          s, prompt_too, dout, [&](float* out, float* lse) { ASSERT_DONE(attention.attend(s.a, out, lse)); },
          [&](const float* out, const float* lse, const float* d, const ChunkAttentionGradient& g) {
            ASSERT_DONE(attention.backward(s.a, out, lse, d, g));
          });
    };
    const Found have = on_card(), again = on_card();
    EXPECT_TRUE(have.out == again.out && have.lse == again.lse && have.dq == again.dq && have.dk == again.dk &&
                have.dv == again.dv && have.dmix == again.dmix && have.dprompt == again.dprompt);
    const Found cpu = run(
        s, prompt_too, dout, [&](float* out, float* lse) { attend_chunk(s.a, out, lse, pool); },
        [&](const float* out, const float* lse, const float* d, const ChunkAttentionGradient& g) {
          attend_chunk_backward(s.a, out, lse, d, g, pool);
        });
    const auto near = [&](const std::vector<float>& x, const std::vector<float>& y, const char* what) {
      // Gradients may cancel: of a single row they do so altogether.
      EXPECT_LE(distance(x, y), 1e-5 * norm_of(y) + 1e-6 * norm_of(dout)) << what;
    };
    near(have.out, cpu.out, "out");
    near(have.lse, cpu.lse, "lse");
    near(have.dq, cpu.dq, "dq");
    near(have.dk, cpu.dk, "dk");
    near(have.dv, cpu.dv, "dv");
    near(have.dmix, cpu.dmix, "dmix");
    near(have.dprompt, cpu.dprompt, "dprompt");

    std::vector<double> out, lse, side;
    attend_in_double(s, {}, out, lse);
    double error = 0, size = 0, lse_error = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      error += std::pow(have.out[i] - out[i], 2);
      size += out[i] * out[i];
    }
    for (size_t i = 0; i < lse.size(); ++i) lse_error = std::max(lse_error, std::abs(have.lse[i] - lse[i]));
    EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(size));
    EXPECT_LE(lse_error, 1e-5);
    // <gradient, direction> against central differences in double.
    const auto check = [&](const std::vector<float>& gradient, Moves moves, const std::vector<float>& by,
                           const char* what) {
      double expected = 0, scale = 0;
      for (size_t i = 0; i < by.size(); ++i) {
        const double g = gradient[i];
        expected += g * by[i];
        scale += g * g;
      }
      double loss[2] = {0, 0};
      for (int i = 0; i < 2; ++i) {
        moves.step = i == 0 ? 1e-5 : -1e-5;
        attend_in_double(s, moves, side, lse);
        for (size_t j = 0; j < side.size(); ++j) loss[i] += side[j] * dout[j];
      }
      EXPECT_NEAR((loss[0] - loss[1]) / 2e-5, expected, (1e-5 * std::sqrt(scale) + 2e-7 * norm_of(dout)) * norm_of(by))
          << what;
    };
    const auto by_q = normal_floats(int64_t(s.q.size()), 11), by_k = normal_floats(int64_t(s.k.size()), 12),
               by_v = normal_floats(int64_t(s.v.size()), 13), by_mix = normal_floats(int64_t(s.mix.size()), 14);
    check(have.dq, {.q = &by_q}, by_q, "dq");
    check(have.dk, {.k = &by_k}, by_k, "dk");
    check(have.dv, {.v = &by_v}, by_v, "dv");
    if (shape.mixed) check(have.dmix, {.mix = &by_mix}, by_mix, "dmix");
  }
}

// The double sums of the CPU are checked against differences in tests/grad.
TEST(CardChunk, ChannelGrams) {
  LONGKV_NEED_CARD();
  ThreadPool pool(4);
  CardMemory memory(0);
  auto gemm = std::move(CardGemm::create(memory)).value();
  auto stream = std::move(CardStream::create()).value();
  const Shape shapes[] = {
      {1, 64, 1, 65, {1, 33}, 0, true, true, false, false, 1},
      {3, 96, 7, 300, {5, 261}, 0, true, false, false, false, 100000},  // 12 rows at a time
      {4, 128, 64, 257, {16, 240}, 0, true, true, false, false, 1 << 26},
      {3, 256, 7, 90, {10, 74}, 0, true, true, false, false, 50000},
      {1, 64, 7, 40, {}, 0, true, false, false, false, 1 << 26},
  };
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(testing::Message() << "group " << shape.group << ", dim " << shape.dim);
    Scene s(shape);
    const int64_t dim = 160, side = shape.dim + 1, cols = Scene::kHeads * shape.group * shape.dim;
    std::vector<float> mask = normal_floats(Scene::kHeads * shape.dim, 21), out(s.q.size()),
                       lse(s.q.size() / size_t(shape.dim));
    std::fill(s.mix.begin(), s.mix.end(), 0.0f);
    for (size_t i = 0; i < mask.size(); ++i) {
      mask[i] = mask[i] > 0 ? 1.0f : 0.0f;
      s.mix[i * size_t(shape.dim) + i % size_t(shape.dim)] = mask[i];
    }
    attend_chunk(s.a, out.data(), lse.data(), pool);
    const auto teacher = normal_floats(int64_t(out.size()), 22), weights = normal_floats(dim * cols, 23, 0.1f);
    Weight wo;
    wo.rows = dim;
    wo.cols = cols;
    wo.row_bytes = cols * 4;
    wo.data = reinterpret_cast<const uint8_t*>(weights.data());
    std::vector<int64_t> rows;
    for (int64_t t = 0; t < shape.tokens; t += 3) rows.push_back(t);
    const ChannelGramInputs in{mask.data(), out.data(), lse.data(), teacher.data(), &wo, rows};
    std::vector<double> cpu(size_t(Scene::kHeads * side * side)), have(cpu.size()), again(cpu.size());
    channel_grams(s.a, in, cpu.data(), pool);
    CardPromptRows held(memory, stream.get(), pool);
    CardChannelGrams on_card(held, *gemm, stream.get(), pool, shape.score_bytes);
    const auto to_card = [&](float* to) {
      return cuda_status(cudaMemcpyAsync(to, weights.data(), weights.size() * 4, cudaMemcpyHostToDevice, stream.get()),
                         "weights of a test");
    };
    ASSERT_DONE(on_card.run(s.a, in, to_card, have.data()));
    ASSERT_DONE(on_card.run(s.a, in, to_card, again.data()));
    EXPECT_EQ(have, again);
    for (int h = 0; h < Scene::kHeads; ++h) {
      // Channels apart from the last row and column, which are larger.
      double error[2] = {0, 0}, size[2] = {0, 0};
      for (int64_t i = 0; i < side * side; ++i) {
        const int which = i % side == shape.dim || i / side == shape.dim;
        const auto at = size_t(h * side * side + i);
        error[which] += std::pow(have[at] - cpu[at], 2);
        size[which] += cpu[at] * cpu[at];
      }
      EXPECT_LE(std::sqrt(error[0]), 3e-5 * std::sqrt(size[0])) << "head " << h;
      EXPECT_LE(std::sqrt(error[1]), 3e-5 * std::sqrt(size[1])) << "head " << h;
    }
  }
}

// Copies of a prompt's rows serve until they are forgotten, and make room for others.
TEST(CardChunk, RowsOfPromptsStay) {
  LONGKV_NEED_CARD();
  ThreadPool pool(2);
  Scene s({1, 64, 2, 300, {}, 0, false, false, false, false, 1});
  const int64_t bytes = Scene::kHeads * s.a.held * 64 * 2 * 4;
  CardMemory memory(5 * bytes / 2);  // two of them
  auto stream = std::move(CardStream::create()).value();
  CardPromptRows rows(memory, stream.get(), pool);
  const auto get = [&](uint64_t id, int layer, int64_t n) {
    s.a.prompt_id = id;
    s.a.layer = layer;
    for (KvHeadView& view : s.a.prompt) view.rows = n;
    const auto got = rows.get(s.a);
    ASSERT_TRUE(got.ok()) << got.status().message();
    std::vector<float> have(static_cast<size_t>(Scene::kHeads * s.a.held * 64));
    OnCard::check(cudaMemcpy(have.data(), got->v, have.size() * 4, cudaMemcpyDeviceToHost));
    EXPECT_EQ(have, s.values);
    OnCard::check(cudaMemcpy(have.data(), got->k, have.size() * 4, cudaMemcpyDeviceToHost));
    EXPECT_EQ(have, s.keys);
  };
  get(1, 0, 300);
  get(1, 0, 200);  // an earlier question of the same document
  EXPECT_EQ(rows.uploads(), 1);
  get(1, 1, 300);
  get(1, 0, 300);
  EXPECT_EQ(rows.uploads(), 2);
  get(2, 0, 300);  // layer 1 of the first was used longest ago
  get(1, 0, 300);
  EXPECT_EQ(rows.uploads(), 3);
  get(1, 1, 300);
  EXPECT_EQ(rows.uploads(), 4);
  rows.forget(1);
  EXPECT_LE(memory.used(), bytes);
  s.keys[5] += 1.0f;
  get(1, 0, 300);
  EXPECT_EQ(rows.uploads(), 5);
  get(0, 0, 300);  // without an id every call brings them
  get(0, 0, 300);
  EXPECT_EQ(rows.uploads(), 7);
  // More than the cap is an error that names it, and what was held can be had again.
  s.a.prompt_id = 9;
  CardMemory small(bytes / 2);
  CardPromptRows none(small, stream.get(), pool);
  EXPECT_EQ(none.get(s.a).status().code(), Code::kOutOfMemory);
  EXPECT_EQ(small.used(), 0);
  s.a.prompt[1].rows -= 1;
  EXPECT_EQ(rows.get(s.a).status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace longkv
