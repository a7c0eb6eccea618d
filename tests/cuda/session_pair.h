// Sessions of one model on the card and on the CPU, for tests that compare them.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/threads.h"
#include "cuda/card_session.h"
#include "engine/likelihood.h"
#include "engine/session.h"
#include "support/paths.h"

namespace longkv {

struct Pair {
  std::unique_ptr<ThreadPool> pool = std::make_unique<ThreadPool>(default_threads());
  std::shared_ptr<const LoadedModel> model;
  std::shared_ptr<CardModel> card;

  std::unique_ptr<Session> session(bool on_card, int64_t context, KvType type = KvType::kF16, int64_t chunk = 0,
                                   PrefillOrder order = PrefillOrder::kLayerMajor) const {
    SessionOptions o;
    o.context = context;
    o.recipe.store.k = o.recipe.store.v = type;
    o.products = ProductType::kF32;
    o.order = order;
    if (on_card) o.card = card;
    o.card_chunk = chunk;
    auto made = Session::create(model, o, *pool);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? std::move(made).value() : nullptr;
  }
};

inline Pair open_pair(const std::string& path) {
  Pair p;
  p.model = LoadedModel::load(path).value();
  auto card = CardModel::load(p.model, {});
  EXPECT_TRUE(card.ok()) << card.status().message();
  if (card.ok()) p.card = std::move(card).value();
  return p;
}

// A session in fp32 products; card: where it runs, or nullptr.
inline std::unique_ptr<Session> open_session(const std::shared_ptr<const LoadedModel>& model, const std::string& recipe,
                                             const std::shared_ptr<CardModel>& card, ThreadPool& pool,
                                             int64_t context = 4096) {
  SessionOptions o;
  o.context = context;
  const auto parsed = parse_recipe(recipe);
  EXPECT_TRUE(parsed.ok()) << parsed.status().message();
  if (!parsed.ok()) return nullptr;
  o.recipe = *parsed;
  o.products = ProductType::kF32;
  o.card = card;
  auto made = Session::create(model, o, pool);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? std::move(made).value() : nullptr;
}

inline Status decode_all(Session& s, std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    if (const Status done = s.decode(id); !done.ok()) return done;
  }
  return {};
}

// Reads a prompt that is interrupted when half of it, over all layers, has been read.
inline void interrupt_prompt(Session& s, std::span<const int32_t> ids) {
  std::atomic<bool> cancel = false;
  const Status left = s.prefill(
      ids, [&](int64_t done, int64_t total) { cancel = cancel || done > total / 2; }, &cancel);
  EXPECT_EQ(left.code(), Code::kCancelled) << left.message();
}

inline double relative_error(std::span<const float> have, std::span<const float> want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(double(have[i]) - want[i], 2);
    norm += std::pow(double(want[i]), 2);
  }
  return std::sqrt(error / norm);
}

// Real models by name; those that are not there are left out.
inline std::vector<std::string> models() {
  std::vector<std::string> list = {test::repo_model("needle-10m-128k-f16.gguf")};
  const char* dir = std::getenv("LONGKV_MODELS");
  if (dir == nullptr) return list;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    if (entry.path().extension() == ".gguf") list.push_back(entry.path());
  }
  return list;
}

inline void expect_close(const Pair& p, std::span<const float> have, std::span<const float> want, const char* what,
                         double kl_limit) {
  ASSERT_EQ(have.size(), want.size());
  const double kl = kl_divergence(want.data(), have.data(), p.model->config().vocab);
  std::printf("  %s: %s, relative error %.2e, KL %.2e\n", p.model->config().name.c_str(), what,
              relative_error(have, want), kl);
  EXPECT_LT(kl, kl_limit) << what;
}

}  // namespace longkv
