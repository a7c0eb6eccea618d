// Sessions over the tiny models, and reading on from a state.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/kv_file.h"
#include "engine/session.h"
#include "support/golden.h"
#include "support/paths.h"
#include "support/program.h"
#include "support/random_ids.h"

namespace longkv::test {

inline std::shared_ptr<const LoadedModel> tiny(const std::string& name) {
  auto model = LoadedModel::load(tiny_model(name));
  EXPECT_TRUE(model.ok()) << model.status().message();
  return *model;
}

inline std::unique_ptr<Session> make(const std::shared_ptr<const LoadedModel>& model, const std::string& kv,
                                     ThreadPool& pool, int64_t context = 512) {
  SessionOptions o;
  o.context = context;
  auto recipe = parse_recipe(kv);
  EXPECT_TRUE(recipe.ok()) << kv << ": " << recipe.status().message();
  if (!recipe.ok()) return nullptr;
  o.recipe = *recipe;
  auto session = Session::create(model, o, pool);
  EXPECT_TRUE(session.ok()) << kv << ": " << session.status().message();
  return session.ok() ? std::move(session).value() : nullptr;
}

// Logits after each of `more`, read one after another, then after `prompt`, then after each of `more` again.
inline std::vector<float> go_on(Session& s, std::span<const int32_t> more, std::span<const int32_t> prompt) {
  std::vector<float> all;
  const auto note = [&] { all.insert(all.end(), s.logits().begin(), s.logits().end()); };
  note();
  const auto decode = [&] {
    for (const int32_t id : more) {
      EXPECT_TRUE(s.decode(id).ok());
      note();
    }
  };
  decode();
  const Status read = s.prefill(prompt);
  EXPECT_TRUE(read.ok()) << read.message();
  note();
  decode();
  return all;
}

}  // namespace longkv::test
