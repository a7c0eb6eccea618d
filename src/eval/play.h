// One prompt under many KV recipes: it is read once with full attention, every recipe takes in its keys and values, and
// then decodes the question and its own answer. Recipes that change how a prompt is read, read it by themselves.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/session.h"
#include "eval/prompt.h"
#include "kv/recipe.h"
#include "longkv/status.h"

namespace longkv {

struct PlayOptions {
  bool question_seen = false;  // the whole prompt but its last token is read before recipes act
  int check_every = 4;         // every n-th step up to the first different token measures mass and error; 0: none
};

// What a recipe answered and what it cost. Averages over decoded tokens: question and answer.
struct PlayedAnswer {
  std::string skipped;  // why there is none
  std::string text;     // up to the sample's stop
  std::vector<int32_t> ids;
  std::string finish;              // "eos", "stop", "length"; "forced" where a continuation was given
  double nll = 0;                  // nats per token of a continuation
  std::vector<double> kl_buckets;  // of a continuation, by quarter
  // Against full attention, over steps that were fed the same tokens.
  int64_t compared = 0;
  double kl_mean = 0, kl_max = 0, same_top = 0;
  int64_t checked = 0;
  double captured_mass = 1, output_error = 0;
  std::vector<double> layer_mass;
  // Cost.
  bool shared_prefill = false;  // the prompt was read by full attention for several recipes
  double prefill_seconds = 0;
  double seconds_per_token = 0;  // median of unchecked steps
  double kept_rows = 0;          // per layer and KV head, after the document
  int64_t kept_bytes = 0, index_bytes = 0;
  double rows_attended = 0;    // per layer, KV head and step
  double bytes_per_token = 0;  // K, V and summaries read
};

class PromptPlayer {
 public:
  // `session` is empty and full attention in f16.
  PromptPlayer(Session& session, const Tokenizer& tokenizer, PlayOptions options, const std::atomic<bool>* cancel)
      : session_(session), tokenizer_(tokenizer), options_(options), cancel_(cancel) {}

  // Receives the answer of full attention (-1) and then of each of `recipes`; its error ends the prompt.
  using Sink = std::function<Status(int64_t recipe, const PlayedAnswer& answer)>;
  // The recipes all hold their rows at the same time. Leaves the session empty. A recipe that cannot read this prompt
  // is skipped with its reason. Errors: kCancelled and what ends a run.
  Status play(const EvalPrompt& prompt, std::span<const Recipe> recipes, const PrefillProgress& progress,
              const Sink& sink);

 private:
  struct Script;
  Status answer(const EvalPrompt& prompt, int64_t document, Script& script, bool writes, PlayedAnswer& out);
  Status step(int32_t id, std::vector<double>& seconds);
  void measure_prompt(PlayedAnswer& out) const;

  Session& session_;
  const Tokenizer& tokenizer_;
  PlayOptions options_;
  const std::atomic<bool>* cancel_;
};

// "question, answer", "prompt, question, answer", "answer": what a recipe computes differently from full attention.
std::string sparse_phases(const Recipe& recipe, const PlayOptions& options);

}  // namespace longkv
