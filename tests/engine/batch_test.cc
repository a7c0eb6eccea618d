// Several sequences in one step: each gets the bits that it gets alone.
#include "engine/batch.h"

#include <gtest/gtest.h>

#include "support/golden.h"
#include "support/paths.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::random_ids;

TEST(BatchDecoder, EverySequenceAsAlone) {
  ThreadPool pool(2);
  std::vector<std::string> models = {test::tiny_model("llama"), test::tiny_model("gemma3"),
                                     test::repo_model("needle-10m-128k-f16.gguf")};
  const std::string smol = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
  if (!smol.empty()) models.push_back(smol);
  const char* recipes[] = {"full", "quest:block=16,budget=64,dense_layers=0", "full", "h2o:budget=64",
                           "snapkv:budget=64"};
  for (const std::string& path : models) {
    const auto model = *LoadedModel::load(path);
    const int64_t vocab = model->config().vocab;
    for (const ProductType products : {ProductType::kInt8, ProductType::kF32}) {
      if (path == smol && products == ProductType::kF32) continue;  // slow, and the tiny ones have such products too
      BatchDecoder batch(model, 256, products, pool);
      // Up to more than one group, each of other length and recipe; one is checked now and then.
      std::vector<std::unique_ptr<Session>> alone, together;
      for (int i = 0; i < 9; ++i) {
        SessionOptions o{.context = 256, .recipe = *parse_recipe(recipes[i % 5]), .products = products, .chunk = 64};
        for (auto* list : {&alone, &together}) {
          list->push_back(*Session::create(model, o, pool));
          list->back()->set_check_every(i == 3 ? 2 : 0);
          ASSERT_TRUE(list->back()->prefill(random_ids(20 + 7 * i, vocab, uint32_t(i))).ok());
        }
      }
      for (int step = 0; step < 6; ++step) {
        const auto ids = random_ids(9, vocab, uint32_t(100 + step));
        const int n = step < 5 ? step * 2 + 1 : 2;  // 1, 3, 5, 7, 9, 2 of them
        std::vector<Session*> sessions;
        for (int i = 0; i < n; ++i) sessions.push_back(together[size_t(i)].get());
        std::vector<Status> results(static_cast<size_t>(n));
        batch.decode(sessions, std::span(ids).first(size_t(n)), results);
        for (int i = 0; i < n; ++i) {
          ASSERT_TRUE(results[size_t(i)].ok()) << results[size_t(i)].message();
          ASSERT_TRUE(alone[size_t(i)]->decode(ids[size_t(i)]).ok());
          const auto a = alone[size_t(i)]->logits(), b = together[size_t(i)]->logits();
          ASSERT_TRUE(std::equal(a.begin(), a.end(), b.begin())) << path << " step " << step << " sequence " << i;
        }
      }
    }
  }
}

TEST(BatchDecoder, WhatOneIsRefusedDoesNotDisturbTheOthers) {
  ThreadPool pool(2);
  const auto model = *LoadedModel::load(test::tiny_model("llama"));
  const int64_t vocab = model->config().vocab;
  BatchDecoder batch(model, 64, ProductType::kInt8, pool);
  SessionOptions o{.context = 64, .recipe = *parse_recipe("full"), .chunk = 32};
  const auto full = *Session::create(model, o, pool), good = *Session::create(model, o, pool),
             wrong = *Session::create(model, o, pool), alone = *Session::create(model, o, pool);
  ASSERT_TRUE(full->prefill(random_ids(64, vocab, 1)).ok() && good->prefill(random_ids(30, vocab, 2)).ok());
  ASSERT_TRUE(wrong->prefill(random_ids(30, vocab, 3)).ok() && alone->prefill(random_ids(30, vocab, 2)).ok());
  Session* const sessions[] = {full.get(), good.get(), wrong.get()};
  const int32_t ids[] = {1, 2, int32_t(vocab)};
  Status results[3];
  batch.decode(sessions, ids, results);
  EXPECT_EQ(results[0].code(), Code::kInvalidArgument);
  EXPECT_TRUE(results[1].ok());
  EXPECT_EQ(results[2].code(), Code::kInvalidArgument);
  ASSERT_TRUE(alone->decode(2).ok());
  EXPECT_TRUE(std::equal(good->logits().begin(), good->logits().end(), alone->logits().begin()));
}

}  // namespace
}  // namespace longkv
