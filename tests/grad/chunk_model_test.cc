// The hand-written backward pass against differences of the forward pass, and the forward pass against a session's.
#include "grad/chunk_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "engine/session.h"
#include "support/golden.h"

namespace longkv {
namespace {

constexpr int64_t kPrompt = 90, kChunk = 11;
constexpr RowRange kMiddle{5, 69};

struct Scene {
  std::shared_ptr<const LoadedModel> model;
  std::unique_ptr<Session> session;
  std::vector<int32_t> chunk;
};

Scene scene_of(const std::string& name, ThreadPool& pool, const std::string& kv = "store=f32") {
  Scene s;
  s.model = *LoadedModel::load(test::tiny_model(name));
  SessionOptions options;
  options.context = 256;
  options.recipe = *parse_recipe(kv);
  options.products = ProductType::kF32;
  s.session = std::move(Session::create(s.model, options, pool)).value();
  std::mt19937 rng(3);
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < kPrompt; ++i) prompt.push_back(int32_t(rng() % uint64_t(s.model->config().vocab)));
  for (int64_t i = 0; i < kChunk; ++i) s.chunk.push_back(int32_t(rng() % uint64_t(s.model->config().vocab)));
  EXPECT_TRUE(s.session->prefill(prompt).ok());
  return s;
}

std::vector<float> random_values(int64_t n, float low, float high, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> draw(low, high);
  std::vector<float> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(draw(rng));
  return out;
}

double inner(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += double(a[i]) * b[i];
  return sum;
}

// How far the logits of the chunk's last token are from the session's, which has read the same chunk; relative.
double logits_difference(const Scene& s, const ChunkTape& tape, ThreadPool& pool) {
  const ModelConfig& c = s.model->config();
  std::vector<float> logits(size_t(c.vocab));
  Matmul matmul(pool, ProductType::kF32);
  MatmulInput input;
  input.reset(tape.final.data() + (kChunk - 1) * c.dim, 1, c.dim);
  matmul.run(s.model->weights().output, input, logits.data(), c.vocab);
  if (c.final_softcap > 0) softcap_in_place(logits.data(), c.final_softcap, c.vocab, pool);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    difference += std::pow(double(logits[i]) - s.session->logits()[i], 2);
    norm += std::pow(double(logits[i]), 2);
  }
  return std::sqrt(difference / norm);
}

TEST(ChunkModel, DenseForwardEqualsTheSessions) {
  ThreadPool pool(2);
  for (const std::string& name : test::tiny_goldens()) {
    Scene s = scene_of(name, pool);
    auto model = ChunkModel::create(s.model, 256, pool);
    ASSERT_TRUE(model.ok()) << model.status().message();
    ChunkTape tape;
    ASSERT_TRUE((*model)->forward({s.session->kv().cache(), kPrompt, kMiddle}, s.chunk, {}, tape).ok());
    ASSERT_TRUE(s.session->prefill(s.chunk).ok());
    EXPECT_LT(logits_difference(s, tape, pool), 1e-5) << name;
  }
}

TEST(ChunkModel, IdentityIsDense) {
  ThreadPool pool(2);
  Scene s = scene_of("llama", pool);
  auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
  const ModelConfig& c = s.model->config();
  const auto dim = size_t(c.head_dim_k);
  std::vector<float> ones(size_t(c.layers * c.kv_heads) * dim * dim, 0.0f);
  for (size_t i = 0; i < ones.size(); ++i) ones[i] = i / dim % dim == i % dim ? 1.0f : 0.0f;
  ChunkTape dense, masked;
  const ChunkPrompt prompt{s.session->kv().cache(), kPrompt, kMiddle};
  ASSERT_TRUE(model->forward(prompt, s.chunk, {}, dense).ok());
  for (bool compensate : {false, true}) {
    ASSERT_TRUE(model->forward(prompt, s.chunk, {OldRows::kMixed, ones.data(), compensate, {}, nullptr}, masked).ok());
    for (size_t i = 0; i < dense.final.size(); ++i) ASSERT_NEAR(dense.final[i], masked.final[i], 2e-5f);
  }
}

// A chunk in a document's middle sees nothing of what follows.
TEST(ChunkModel, RowsAfterTheChunkDoNotExist) {
  ThreadPool pool(2);
  Scene s = scene_of("llama", pool);
  auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
  ChunkTape inside, behind;
  ASSERT_TRUE(model->forward({s.session->kv().cache(), kPrompt - 10, {5, 37}}, s.chunk, {}, inside).ok());
  ASSERT_TRUE(s.session->truncate(kPrompt - 10).ok());
  ASSERT_TRUE(model->forward({s.session->kv().cache(), kPrompt - 10, {5, 37}}, s.chunk, {}, behind).ok());
  EXPECT_EQ(inside.final, behind.final);
}

// <gradient, direction> against central differences, for directions over all values and over single layers.
void expect_gradient(const std::string& name, OldRows kind, bool compensate, ThreadPool& pool) {
  Scene s = scene_of(name, pool);
  auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
  const ChunkPrompt prompt{s.session->kv().cache(), kPrompt, kMiddle};
  const int64_t per_layer = model->values_per_layer(kind), n = s.model->config().layers * per_layer;
  ChunkTape teacher, tape;
  ASSERT_TRUE(model->forward(prompt, s.chunk, {}, teacher).ok());
  // Mixes near a multiple of one, so that scores stay those of a model.
  std::vector<float> values = random_values(n, 0.2f, 0.9f, 7);
  const int64_t dim = s.model->config().head_dim_k;
  for (int64_t i = 0; kind == OldRows::kMixed && i < n; ++i) {
    values[size_t(i)] = 0.05f * (values[size_t(i)] - 0.5f) + (i / dim % dim == i % dim ? 0.6f : 0.0f);
  }
  // Heads whose keys are gone, in every way.
  std::vector<OldHead> heads(size_t(s.model->config().layers * s.model->config().kv_heads));
  for (size_t h = 0; kind == OldRows::kMixed && h < heads.size(); ++h) {
    heads[h] = {h % 4 == 3, RemovedAs(h / 4 % 3), 0.3f};
  }
  const OldMask mask{kind, values.data(), compensate, heads, &teacher};
  ASSERT_TRUE(model->forward(prompt, s.chunk, mask, tape).ok());
  const std::vector<float> weights = random_values(int64_t(tape.final.size()), -1, 1, 8);  // loss = <weights, final>
  std::vector<float> gradient(size_t(n), 0.0f);
  ASSERT_TRUE(model->backward(prompt, mask, tape, weights.data(), gradient.data()).ok());
  const double size = std::sqrt(inner(gradient, gradient));
  bool learns = false;
  for (int layer = 0; layer < s.model->config().layers; ++layer) learns = learns || model->learns(layer);
  ASSERT_EQ(size > 1e-3, learns) << name;  // a model of sliding windows alone has nothing to learn
  for (int trial = 0; trial < 4; ++trial) {
    std::vector<float> direction = random_values(n, -1, 1, uint32_t(20 + trial));
    if (trial < s.model->config().layers) {
      for (int64_t i = 0; i < n; ++i) {
        if (i / per_layer != trial) direction[size_t(i)] = 0.0f;
      }
    }
    if (trial < s.model->config().layers && !model->learns(trial)) {
      EXPECT_EQ(inner(gradient, direction), 0.0) << "a sliding-window layer has no old rows";
      continue;
    }
    const auto difference_at = [&](float step) {
      double loss[2] = {0, 0};
      for (int side = 0; side < 2; ++side) {
        std::vector<float> moved = values;
        for (size_t i = 0; i < moved.size(); ++i) moved[i] += (side == 0 ? step : -step) * direction[i];
        OldMask there = mask;
        there.values = moved.data();
        EXPECT_TRUE(model->forward(prompt, s.chunk, there, tape).ok());
        loss[side] = inner(weights, tape.final);
      }
      return (loss[0] - loss[1]) / (2.0 * step);
    };
    // Richardson: the error of a central difference falls with the square of its step.
    const double coarse = difference_at(0.016f), fine = difference_at(0.008f);
    const double difference = (4 * fine - coarse) / 3, expected = inner(gradient, direction);
    const double length = std::sqrt(inner(direction, direction));
    const double tolerance = 0.2 * std::abs(fine - coarse) + 1e-4 * size * length + 1e-3 * std::abs(expected);
    EXPECT_NEAR(difference, expected, tolerance) << name << " direction " << trial << ", |gradient| " << size;
  }
}

TEST(ChunkModel, MixGradientEqualsDifferences) {
  ThreadPool pool(2);
  bool compensate = false;
  for (const std::string& name : test::tiny_goldens()) {
    compensate = !compensate;
    expect_gradient(name, OldRows::kMixed, compensate, pool);
  }
}

TEST(ChunkModel, GateGradientEqualsDifferences) {
  ThreadPool pool(2);
  for (const std::string& name : test::tiny_goldens()) expect_gradient(name, OldRows::kGates, false, pool);
}

TEST(ChunkModel, DivergenceAndItsGradient) {
  ThreadPool pool(2);
  for (const char* name : {"llama", "gemma3-linear-softcap"}) {
    Scene s = scene_of(name, pool);
    const ModelConfig& c = s.model->config();
    auto model = ChunkModel::create(s.model, 256, pool);
    ASSERT_TRUE(model.ok()) << model.status().message();
    constexpr int64_t kRows = 3;
    const std::vector<float> teacher = random_values(kRows * c.dim, -2, 2, 1);
    std::vector<float> student = random_values(kRows * c.dim, -2, 2, 2), gradient(student.size());
    EXPECT_NEAR(*(*model)->divergence(teacher.data(), teacher.data(), kRows, nullptr), 0.0, 1e-9);
    const double loss = *(*model)->divergence(teacher.data(), student.data(), kRows, gradient.data());
    // From logits of one product each, in double.
    const auto log_softmax = [&](const std::vector<float>& x, int64_t t) {
      std::vector<double> logits;
      std::vector<float> row(size_t(c.dim));
      double top = -1e300, sum = 0;
      for (int64_t v = 0; v < c.vocab; ++v) {
        dequantize(s.model->weights().output.type, s.model->weights().output.row(v), row.data(), c.dim);
        double z = 0;
        for (int64_t i = 0; i < c.dim; ++i) z += double(row[size_t(i)]) * x[size_t(t * c.dim + i)];
        if (c.final_softcap > 0) z = c.final_softcap * std::tanh(z / c.final_softcap);
        logits.push_back(z);
        top = std::max(top, z);
      }
      for (double z : logits) sum += std::exp(z - top);
      for (double& z : logits) z -= top + std::log(sum);
      return logits;
    };
    double expected = 0;
    for (int64_t t = 0; t < kRows; ++t) {
      const std::vector<double> p = log_softmax(teacher, t), q = log_softmax(student, t);
      for (size_t v = 0; v < p.size(); ++v) expected += std::exp(p[v]) * (p[v] - q[v]) / kRows;
    }
    EXPECT_NEAR(loss, expected, 1e-5 * expected);
    const std::vector<float> direction = random_values(kRows * c.dim, -1, 1, 3);
    double sides[2];
    for (int side = 0; side < 2; ++side) {
      std::vector<float> moved = student;
      for (size_t i = 0; i < moved.size(); ++i) moved[i] += (side == 0 ? 0.01f : -0.01f) * direction[i];
      sides[side] = *(*model)->divergence(teacher.data(), moved.data(), kRows, nullptr);
    }
    EXPECT_NEAR((sides[0] - sides[1]) / 0.02, inner(gradient, direction), 2e-3 * std::abs(inner(gradient, direction)));
  }
}

// Merged and rounded rows are what a session attends too.
TEST(ChunkModel, MergedRowsGiveTheSessionsLogits) {
  ThreadPool pool(2);
  for (const std::string& name : test::tiny_goldens()) {
    for (const char* store : {"f32", "f16"}) {
      Scene s = scene_of(name, pool, std::string("normmass:budget=60,sink=4,window=8+store=") + store);
      auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
      ChunkTape tape;
      ASSERT_TRUE(model->forward({s.session->kv().cache(), kPrompt, {}}, s.chunk, {}, tape).ok());
      ASSERT_TRUE(s.session->prefill(s.chunk).ok());
      // The session rounds the chunk's own rows to f16 as well.
      EXPECT_LT(logits_difference(s, tape, pool), store == std::string("f32") ? 1e-5 : 2e-3) << name;
    }
  }
}

TEST(ChunkModel, NextTokenLossAndItsGradient) {
  ThreadPool pool(2);
  for (const char* name : {"llama", "gemma3-linear-softcap"}) {
    Scene s = scene_of(name, pool);
    const ModelConfig& c = s.model->config();
    auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
    ChunkTape tape;
    tape.tokens = 70;  // more than are multiplied at once
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < tape.tokens; ++i) ids.push_back(int32_t(i * 7 % c.vocab));
    tape.final = random_values(tape.tokens * c.dim, -2, 2, 5);
    std::vector<float> gradient(tape.final.size()), scratch(tape.final.size());
    const double loss = *model->next_token_loss(tape, ids, gradient.data());
    double expected = 0;
    std::vector<float> row(size_t(c.dim));
    for (int64_t t = 0; t + 1 < tape.tokens; ++t) {
      double sum = 0, right = 0;
      for (int64_t v = 0; v < c.vocab; ++v) {
        dequantize(s.model->weights().output.type, s.model->weights().output.row(v), row.data(), c.dim);
        double z = 0;
        for (int64_t i = 0; i < c.dim; ++i) z += double(row[size_t(i)]) * tape.final[size_t(t * c.dim + i)];
        if (c.final_softcap > 0) z = c.final_softcap * std::tanh(z / c.final_softcap);
        sum += std::exp(z);
        if (v == ids[size_t(t + 1)]) right = z;
      }
      expected += (std::log(sum) - right) / double(tape.tokens - 1);
    }
    EXPECT_NEAR(loss, expected, 1e-5 * expected);
    const std::vector<float> direction = random_values(tape.tokens * c.dim, -1, 1, 6), kept = tape.final;
    double sides[2];
    for (int side = 0; side < 2; ++side) {
      for (size_t i = 0; i < kept.size(); ++i) tape.final[i] = kept[i] + (side == 0 ? 0.01f : -0.01f) * direction[i];
      sides[side] = *model->next_token_loss(tape, ids, scratch.data());
    }
    EXPECT_NEAR((sides[0] - sides[1]) / 0.02, inner(gradient, direction), 2e-3 * std::sqrt(inner(gradient, gradient)));
    tape.tokens = 1;
    EXPECT_TRUE(std::isnan(*model->next_token_loss(tape, {ids.data(), 1}, scratch.data())));
  }
}

// The loss of a chunk by the keys that it finds, merged ones with a bias among them, in every family.
TEST(ChunkModel, KeyGradientEqualsDifferences) {
  ThreadPool pool(2);
  for (const std::string& name : test::tiny_goldens()) {
    Scene s = scene_of(name, pool, "normmass:budget=60,sink=4,window=8+store=f32");
    auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
    const ModelConfig& c = s.model->config();
    KvCache& cache = const_cast<KvCache&>(s.session->kv().cache());
    const ChunkPrompt prompt{cache, kPrompt, {}};
    ChunkTape tape;
    std::vector<float> dfinal(size_t(kChunk * c.dim)), scratch(dfinal.size());
    const auto loss_of = [&] {
      EXPECT_TRUE(model->forward(prompt, s.chunk, {}, tape).ok());
      return *model->next_token_loss(tape, s.chunk, scratch.data());
    };
    ASSERT_TRUE(model->forward(prompt, s.chunk, {}, tape).ok());
    ASSERT_TRUE(model->next_token_loss(tape, s.chunk, dfinal.data()).ok());
    std::vector<std::vector<float>> keys;
    ASSERT_TRUE(model->backward(prompt, {}, tape, dfinal.data(), nullptr, &keys).ok());
    ASSERT_EQ(int64_t(keys.size()), c.layers);
    for (int layer = 0; layer < c.layers; ++layer) {
      const std::vector<float>& gradient = keys[size_t(layer)];
      if (!model->learns(layer)) {
        EXPECT_TRUE(gradient.empty());
        continue;
      }
      const int64_t rows = cache.rows(layer).v, dim = c.head_dim_k;
      ASSERT_EQ(rows, 60);
      ASSERT_EQ(int64_t(gradient.size()), c.kv_heads * (rows + kChunk) * dim);
      const std::vector<float> direction = random_values(c.kv_heads * rows * dim, -1, 1, uint32_t(50 + layer));
      std::vector<float> key(static_cast<size_t>(dim));
      const auto move = [&](float step) {
        for (int h = 0; h < c.kv_heads; ++h) {
          for (int64_t r = 0; r < rows; ++r) {
            cache.read_row(layer, h, r, key.data(), nullptr);
            for (int64_t i = 0; i < dim; ++i) key[size_t(i)] += step * direction[size_t((h * rows + r) * dim + i)];
            cache.write_row(layer, h, r, key.data(), nullptr);
          }
        }
      };
      double expected = 0, size = 0;
      for (int h = 0; h < c.kv_heads; ++h) {
        for (int64_t i = 0; i < rows * dim; ++i) {
          const double g = gradient[size_t(h * (rows + kChunk) * dim + i)];
          expected += g * direction[size_t(h * rows * dim + i)];
          size += g * g;
        }
      }
      const auto difference_at = [&](float step) {
        move(step);
        const double up = loss_of();
        move(-2 * step);
        const double down = loss_of();
        move(step);
        return (up - down) / (2.0 * step);
      };
      const double coarse = difference_at(0.1f), fine = difference_at(0.05f);
      ASSERT_GT(size, 0.0) << name;
      EXPECT_NEAR((4 * fine - coarse) / 3, expected,
                  0.2 * std::abs(fine - coarse) + 1e-2 * std::sqrt(size) + 1e-3 * std::abs(expected))
          << name << " layer " << layer << ", |gradient| " << std::sqrt(size);
    }
  }
}

// What rows get sums to one for every query, and is what attention over them gives.
TEST(ChunkModel, MassOfAChunk) {
  ThreadPool pool(2);
  Scene s = scene_of("llama", pool, "normmass:budget=60,sink=4,window=8+store=f32");
  auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
  const ModelConfig& c = s.model->config();
  const ChunkPrompt prompt{s.session->kv().cache(), kPrompt, {}};
  ChunkTape tape;
  ASSERT_TRUE(model->forward(prompt, s.chunk, {}, tape).ok());
  const LayerTape& y = tape.layers[1];
  const int64_t rows = 60 + kChunk, dim = c.head_dim_k;
  std::vector<float> mass(size_t(c.heads * rows));
  chunk_mass(model->attention_of(1, prompt, {}, y, kChunk), y.lse.data(), mass.data(), pool);
  for (int j = 0; j < c.heads; ++j) {
    const int h = j / (c.heads / c.kv_heads);
    const KvHeadView view = s.session->kv().cache().view(1, h);
    std::vector<double> expected(size_t(rows), 0.0);
    for (int64_t t = 0; t < kChunk; ++t) {
      const float* q = y.q.data() + (t * c.heads + j) * dim;
      std::vector<double> w;
      double sum = 0;
      for (int64_t r = 0; r < 60 + t + 1; ++r) {
        const float* k = r < 60 ? reinterpret_cast<const float*>(view.k + r * view.k_stride)
                                : y.k.data() + ((r - 60) * c.kv_heads + h) * dim;
        double z = 0;
        for (int64_t i = 0; i < dim; ++i) z += double(q[i]) * k[i];
        w.push_back(std::exp(c.attn_scale * z + (r < 60 ? view.bias[r] : 0)));
        sum += w.back();
      }
      for (size_t r = 0; r < w.size(); ++r) expected[r] += w[r] / sum;
    }
    double total = 0;
    for (int64_t r = 0; r < rows; ++r) {
      total += mass[size_t(j * rows + r)];
      ASSERT_NEAR(mass[size_t(j * rows + r)], expected[size_t(r)], 2e-5) << j << " " << r;
    }
    EXPECT_NEAR(total, double(kChunk), 1e-3);
  }
}

}  // namespace
}  // namespace longkv
