// A model of packed weight types: the logits of the file's layout, bit for bit, for prompts, decode and several
// sequences in a step; and how near fp32 products its output matrix comes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/cpu.h"
#include "engine/batch.h"
#include "model/graph.h"
#include "ops/packed_rows.h"
#include "quant/block_formats.h"
#include "support/mkgguf.h"
#include "support/paths.h"

namespace longkv {
namespace {

// Random blocks of a type with a packed form, small scales.
std::string random_blocks(TensorType type, int64_t rows, int64_t cols, std::mt19937& rng) {
  const TensorTypeInfo& info = *tensor_type_info(type);
  const bool minimum = type == TensorType::kQ4_1 || type == TensorType::kQ5_1;
  std::string out(size_t(rows * cols / info.block_values * info.block_bytes), '\0');
  for (char& c : out) c = char(rng());
  std::uniform_real_distribution<float> real(-0.02f, 0.02f);
  for (size_t i = 0; i < out.size(); i += size_t(info.block_bytes)) {
    for (size_t at = i; at <= i + (minimum ? 2 : 0); at += 2) {
      const f16_t h = to_f16(real(rng));
      std::memcpy(&out[at], &h, 2);
    }
  }
  return out;
}

// A llama of two layers whose matrices have the four packed types by turns; 12 KV rows are no multiple of eight.
std::string packed_types_model() {
  constexpr uint64_t kDim = 64, kFf = 96, kHeadDim = 12, kHeads = 8, kVocab = 100;
  std::mt19937 rng(3);
  test::MkGguf g;
  g.string("general.architecture", "llama");
  g.u32("llama.block_count", 2).u32("llama.context_length", 256).u32("llama.embedding_length", kDim);
  g.u32("llama.feed_forward_length", kFf).u32("llama.attention.head_count", kHeads);
  g.u32("llama.attention.head_count_kv", 1).f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  g.u32("llama.attention.key_length", kHeadDim).u32("llama.attention.value_length", kHeadDim);
  g.u32("llama.rope.dimension_count", kHeadDim);
  const TensorType types[] = {TensorType::kQ4_0, TensorType::kQ4_1, TensorType::kQ5_0, TensorType::kQ5_1};
  int next = 0;
  const auto matrix = [&](const std::string& name, uint64_t cols, uint64_t rows) {
    const TensorType type = types[next++ % 4];
    g.tensor(name, type, {cols, rows}, random_blocks(type, int64_t(rows), int64_t(cols), rng));
  };
  const auto ones = [&](const std::string& name) { g.f32_tensor(name, {kDim}, std::vector<float>(kDim, 1.0f)); };
  matrix("token_embd.weight", kDim, kVocab);
  for (const std::string p : {"blk.0.", "blk.1."}) {
    ones(p + "attn_norm.weight");
    ones(p + "ffn_norm.weight");
    matrix(p + "attn_q.weight", kDim, kHeads * kHeadDim);
    matrix(p + "attn_k.weight", kDim, kHeadDim);
    matrix(p + "attn_v.weight", kDim, kHeadDim);
    matrix(p + "attn_output.weight", kHeads * kHeadDim, kDim);
    matrix(p + "ffn_gate.weight", kDim, kFf);
    matrix(p + "ffn_up.weight", kDim, kFf);
    matrix(p + "ffn_down.weight", kFf, kDim);
    ++next;  // so that every role meets another type in the next layer
  }
  ones("output_norm.weight");
  return g.write("packed-types.gguf");
}

// Logits after a prompt of 40 tokens, of three decoded ones, and of two sequences that decode together.
std::vector<float> all_logits(const std::shared_ptr<const LoadedModel>& model, ThreadPool& pool) {
  std::mt19937 rng(1);
  const auto ids = [&](int64_t n) {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < n; ++i) out.push_back(int32_t(rng() % uint64_t(model->config().vocab)));
    return out;
  };
  std::vector<float> all;
  std::vector<std::unique_ptr<Session>> sessions;
  const auto keep = [&](const Session& s) { all.insert(all.end(), s.logits().begin(), s.logits().end()); };
  for (int i = 0; i < 2; ++i) {
    sessions.push_back(*Session::create(model, {.context = 128, .recipe = *parse_recipe("full"), .chunk = 64}, pool));
    EXPECT_TRUE(sessions.back()->prefill(ids(40)).ok());
    keep(*sessions.back());
    for (int32_t id : ids(3)) {
      EXPECT_TRUE(sessions.back()->decode(id).ok());
      keep(*sessions.back());
    }
  }
  BatchDecoder batch(model, 128, ProductType::kInt8, pool);
  std::vector<Session*> both = {sessions[0].get(), sessions[1].get()};
  std::vector<Status> results(2);
  batch.decode(both, ids(2), results);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(results[i].ok()) << results[i].message();
    keep(*both[i]);
  }
  return all;
}

TEST(PackedWeights, SameBitsAsTheFilesLayout) {
  std::vector<std::string> models = {packed_types_model()};
  if (const std::string path = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf"); !path.empty()) {
    models.push_back(path);
  }
  const IsaLevel best = available_isa_levels().back();
  for (const std::string& path : models) {
    for (IsaLevel level : available_isa_levels()) {
      ASSERT_TRUE(set_active_isa(level).ok());
      if (!reads_packed(TensorType::kQ4_1) && path != models.front()) continue;  // nothing differs, and it is slow
      for (int threads : {1, 3}) {
        ThreadPool pool(threads);
        auto file_layout = LoadedModel::load(path), packed = LoadedModel::load(path);
        ASSERT_TRUE(file_layout.ok() && packed.ok()) << packed.status().message();
        ASSERT_TRUE((*packed)->pack_weights(pool).ok());
        EXPECT_EQ((*packed)->packed_bytes() > 0, reads_packed(TensorType::kQ4_1)) << isa_name(level);
        const std::vector<float> expected = all_logits(*file_layout, pool), found = all_logits(*packed, pool);
        ASSERT_EQ(found.size(), expected.size());
        EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)), 0)
            << path << " at " << isa_name(level) << ", " << threads << " threads";
      }
    }
  }
  ASSERT_TRUE(set_active_isa(best).ok());
}

// What was packed at one level is read in the file's layout by a level that knows no packed form.
TEST(PackedWeights, ServeLevelsWithoutPackedForm) {
  ThreadPool pool(2);
  const std::string path = packed_types_model();
  const IsaLevel best = available_isa_levels().back();
  auto packed = LoadedModel::load(path), file_layout = LoadedModel::load(path);
  ASSERT_TRUE(packed.ok() && file_layout.ok());
  ASSERT_TRUE((*packed)->pack_weights(pool).ok());
  ASSERT_TRUE(set_active_isa(available_isa_levels().front()).ok());
  EXPECT_EQ(all_logits(*packed, pool), all_logits(*file_layout, pool));
  ASSERT_TRUE(set_active_isa(best).ok());
}

// A value keeps an error of half a step of its group's second term, amax / 127 / 254 / 2, beside fp32's; of normal
// values that is 3e-5 of the root mean square. First terms alone would leave 254 times as much.
TEST(OutputMatrix, MeetsActivationsOf16Bits) {
  const auto model = LoadedModel::load(packed_types_model());
  ASSERT_TRUE(model.ok()) << model.status().message();
  const ModelConfig& c = (*model)->config();
  const IsaLevel best = available_isa_levels().back();
  ThreadPool pool(2);
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  std::vector<float> hidden(size_t(21 * c.dim));
  for (float& x : hidden) x = normal(rng);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    Graph exact(*model, 128, ProductType::kF32, pool), rounded(*model, 128, ProductType::kInt8, pool);
    for (int64_t tokens : {1, 3, 21}) {
      std::vector<float> a(size_t(tokens * c.vocab)), b(a.size());
      exact.logits(hidden.data(), tokens, a.data());
      rounded.logits(hidden.data(), tokens, b.data());
      double error = 0, norm = 0;
      for (size_t i = 0; i < a.size(); ++i) {
        error += std::pow(double(a[i]) - b[i], 2);
        norm += std::pow(double(a[i]), 2);
      }
      EXPECT_LT(std::sqrt(error / norm), 1e-4) << tokens << " tokens, " << isa_name(level);
    }
  }
  ASSERT_TRUE(set_active_isa(best).ok());
}

}  // namespace
}  // namespace longkv
