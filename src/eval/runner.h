// Runs tasks over lengths and recipes: what is missing in a store is computed, in an order that shows every cell early.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/session.h"
#include "eval/play.h"
#include "eval/prompt.h"
#include "eval/store.h"
#include "eval/tasks.h"
#include "kv/recipe.h"
#include "longkv/status.h"

namespace longkv {

struct EvalRecipe {
  Recipe recipe;
  std::string label;  // as typed
};

// What the runner needs of a machine and a model.
struct EvalEngine {
  // An empty session of full attention for one of the jobs; with `noise` in another way that should not matter (number
  // of threads, machine), for the noise floor. Made and ended by one thread at a time, used by the job's own.
  std::function<Result<std::unique_ptr<Session>>(int64_t context, bool noise, int job)> session;
  // Bytes that a recipe's side holds at a context; full attention is Recipe{}.
  std::function<Result<int64_t>(const Recipe& recipe, int64_t context)> bytes;
  std::function<int64_t()> available_bytes;
  std::string noise_label;  // "full@threads=1"
  std::string card;         // that reads the prompts; empty: the CPU does
  int64_t context = 0;      // tokens that the model may hold
  int jobs = 1;             // prompts at a time; what is answered does not depend on it
};

struct EvalOptions {
  std::vector<const EvalTask*> tasks;
  std::vector<EvalSample> given;    // of data sets; their length is what they take
  std::vector<EvalRecipe> recipes;  // beside full attention
  std::vector<int64_t> lengths;
  std::vector<double> depths;
  int64_t samples = 0;  // of each generated task and length
  int64_t noise = 0;    // of them read again by full attention with other threads
  uint64_t seed = 1;
  PromptForm form = PromptForm::kPlain;
  const Haystack* haystack = nullptr;
  PlayOptions play;
};

struct EvalProgress {
  int64_t prompts = 0, prompts_total = 0;  // prompts with all their recipes
  int64_t known = 0;                       // of them found in the store
  std::string now;                         // "niah_single_1 8192 #3"
  double seconds = 0;                      // since the first prompt that was computed
};

// Appends to `store` one record a sample and recipe. Errors: kCancelled (all that was appended stays), kIo,
// kOutOfMemory (not even one recipe fits beside full attention), kInternal.
Status run_evaluation(const EvalOptions& options, const PromptMaker& maker, const EvalEngine& engine, EvalStore& store,
                      const std::function<void(const EvalProgress&)>& report, const std::atomic<bool>* cancel);

// The prompts themselves, in the order in which they would be played: a line of JSON each, with the tokens of document
// and question, for programs that answer the same ones. Those that cannot be made have their reason.
Status write_prompts(const EvalOptions& options, const PromptMaker& maker,
                     const std::function<Status(const std::string& line)>& sink);

}  // namespace longkv
