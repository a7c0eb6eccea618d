// The hand-written backward pass against differences of the forward pass, and the forward pass against a session's.
#include "train/chunk_model.h"

#include <gtest/gtest.h>

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

Scene scene_of(const std::string& name, ThreadPool& pool) {
  Scene s;
  s.model = *LoadedModel::load(test::tiny_model(name));
  SessionOptions options;
  options.context = 256;
  options.recipe = *parse_recipe("store=f32");
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

TEST(ChunkModel, DenseForwardEqualsTheSessions) {
  ThreadPool pool(2);
  for (const std::string& name : test::tiny_goldens()) {
    Scene s = scene_of(name, pool);
    auto model = ChunkModel::create(s.model, 256, pool);
    ASSERT_TRUE(model.ok()) << model.status().message();
    ChunkTape tape;
    ASSERT_TRUE(
        (*model)->forward(s.session->kv().cache(), kMiddle, s.chunk, OldRows::kDense, nullptr, nullptr, tape).ok());
    const ModelConfig& c = s.model->config();
    std::vector<float> logits(size_t(c.vocab));
    Matmul matmul(pool, ProductType::kF32);
    MatmulInput input;
    input.reset(tape.final.data() + (kChunk - 1) * c.dim, 1, c.dim);
    matmul.run(s.model->weights().output, input, logits.data(), c.vocab);
    if (c.final_softcap > 0) softcap_in_place(logits.data(), c.final_softcap, c.vocab, pool);
    ASSERT_TRUE(s.session->prefill(s.chunk).ok());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      difference += std::pow(double(logits[i]) - s.session->logits()[i], 2);
      norm += std::pow(double(logits[i]), 2);
    }
    EXPECT_LT(std::sqrt(difference / norm), 1e-5) << name;
  }
}

TEST(ChunkModel, AlphaOfOneIsDense) {
  ThreadPool pool(2);
  Scene s = scene_of("llama", pool);
  auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
  const std::vector<float> ones(size_t(s.model->config().layers * model->values_per_layer(OldRows::kChannels)), 1.0f);
  ChunkTape dense, masked;
  const KvCache& cache = s.session->kv().cache();
  ASSERT_TRUE(model->forward(cache, kMiddle, s.chunk, OldRows::kDense, nullptr, nullptr, dense).ok());
  ASSERT_TRUE(model->forward(cache, kMiddle, s.chunk, OldRows::kChannels, ones.data(), nullptr, masked).ok());
  for (size_t i = 0; i < dense.final.size(); ++i) ASSERT_NEAR(dense.final[i], masked.final[i], 2e-5f);
}

// <gradient, direction> against central differences, for directions over all values and over single layers.
void expect_gradient(const std::string& name, OldRows kind, ThreadPool& pool) {
  Scene s = scene_of(name, pool);
  auto model = std::move(ChunkModel::create(s.model, 256, pool)).value();
  const KvCache& cache = s.session->kv().cache();
  const int64_t per_layer = model->values_per_layer(kind), n = s.model->config().layers * per_layer;
  ChunkTape teacher, tape;
  ASSERT_TRUE(model->forward(cache, kMiddle, s.chunk, OldRows::kDense, nullptr, nullptr, teacher).ok());
  const std::vector<float> values = random_values(n, 0.2f, 0.9f, 7);
  ASSERT_TRUE(model->forward(cache, kMiddle, s.chunk, kind, values.data(), &teacher, tape).ok());
  const std::vector<float> weights = random_values(int64_t(tape.final.size()), -1, 1, 8);  // loss = <weights, final>
  std::vector<float> gradient(size_t(n), 0.0f);
  model->backward(cache, kMiddle, kind, values.data(), &teacher, tape, weights.data(), gradient.data());
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
        EXPECT_TRUE(model->forward(cache, kMiddle, s.chunk, kind, moved.data(), &teacher, tape).ok());
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

TEST(ChunkModel, AlphaGradientEqualsDifferences) {
  ThreadPool pool(2);
  for (const std::string& name : test::tiny_goldens()) expect_gradient(name, OldRows::kChannels, pool);
}

TEST(ChunkModel, GateGradientEqualsDifferences) {
  ThreadPool pool(2);
  for (const std::string& name : test::tiny_goldens()) expect_gradient(name, OldRows::kGates, pool);
}

}  // namespace
}  // namespace longkv
