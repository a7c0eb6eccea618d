// Several KV recipes over one prompt: it is read once with full attention, every recipe takes in its keys and values,
// then each decodes the same tokens. What a recipe loses against full attention stands beside what it costs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/session.h"
#include "kv/recipe.h"
#include "longkv/status.h"

namespace longkv {

struct CompareOptions {
  // Tokens fed after the prompt, the same to every recipe. When they end before `steps`, full attention's greedy
  // choices follow.
  std::vector<int32_t> continuation;
  int64_t steps = 64;
  int check_every = 4;  // every n-th step measures mass and error; the others are timed
};

// Averages over the decoded steps; mass and error also over layers and query heads.
struct RecipeReport {
  std::string kv;          // canonical recipe
  std::string label;       // as typed
  double kept_rows = 0;    // per layer and KV head, after the prompt
  int64_t kept_bytes = 0;  // K, V and their fields, after the prompt
  int64_t index_bytes_held = 0;
  double bytes_per_token = 0;      // K, V and summaries read
  double captured_mass = 0;        // share of full attention's softmax mass; above 1 where a method overestimates
  double output_error = 0;         // |out - full| / |full| of a layer's attention output, for the recipe's own queries
  double kl_mean = 0, kl_max = 0;  // nats, of the next token's distribution from full attention's
  double same_top = 0;             // share of steps with full attention's best token
  double perplexity = 0;           // of the tokens fed, but for the first; 0: fewer than two
  double seconds_per_token = 0;    // median of unchecked steps
};

// Reads `prompt` into `session`, whose recipe must be full attention and which must be empty, then compares. The first
// report is that of full attention itself. Recipes that change what a prompt's tokens attend read it by themselves.
// Every other recipe is given the keys and values of a prompt read with full attention in f16: one that rounds rows as
// they are written would, alone, also attend rounded rows while reading. Errors: kInvalidArgument (a recipe against the
// model, too many tokens for the context), kCancelled.
Result<std::vector<RecipeReport>> compare_recipes(Session& session, std::span<const Recipe> recipes,
                                                  std::span<const int32_t> prompt, const CompareOptions& options,
                                                  const PrefillProgress& progress, const std::atomic<bool>* cancel);

}  // namespace longkv
