// One prompt under many KV recipes: it is read once with full attention, every recipe takes in its keys and values, and
// then decodes the question and its own answer. Recipes that change how a prompt is read, read it by themselves.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/session.h"
#include "eval/prompt.h"
#include "kv/recipe.h"
#include "longkv/status.h"

namespace longkv {

struct PlayOptions {
  bool question_seen = false;  // the whole prompt but its last token is read before recipes act
  int check_every = 4;         // every n-th step up to the first different token measures mass and error; 0: none
  // Recipes that share a reading decode in step, so that weights are read once for several of them. The answers are the
  // same bits; a token's time is then composed: products as full attention took for them, the recipe's own choice and
  // attention.
  bool in_step = false;
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
  std::vector<double> head_mass;  // [layers][kv_heads]
  // Cost.
  bool shared_prefill = false;  // the prompt was read by full attention for several recipes
  bool read_on_card = false;
  double prefill_seconds = 0;
  double seconds_per_token = 0;  // median of unchecked steps; see PlayOptions::in_step
  double kept_rows = 0;          // per layer and KV head, after the document
  int64_t kept_bytes = 0, index_bytes = 0;
  double rows_attended = 0;    // per layer, KV head and step
  double bytes_per_token = 0;  // K, V and summaries read
};

// What full attention was fed after the document, and what it said after each token.
struct PlayScript {
  std::vector<int32_t> tokens;
  std::vector<float> logits;    // [tokens][vocab]
  double products_seconds = 0;  // of a token, apart from choice and attention
};

class PromptPlayer {
 public:
  // `session` is empty and full attention in f16.
  PromptPlayer(Session& session, const Tokenizer& tokenizer, PlayOptions options, const std::atomic<bool>* cancel);
  ~PromptPlayer();

  // Receives the answer of full attention (-1) and then of each of `recipes`; its error ends the prompt.
  using Sink = std::function<Status(int64_t recipe, const PlayedAnswer& answer)>;
  // The recipes all hold their rows at the same time. Leaves the session empty. A recipe that cannot read this prompt
  // is skipped with its reason. Errors: kCancelled and what ends a run.
  Status play(const EvalPrompt& prompt, std::span<const Recipe> recipes, const PrefillProgress& progress,
              const Sink& sink);
  // Of the last play(), for replay() by another session.
  const PlayScript& script() const { return script_; }
  // Full attention once more, as far as it is fed what `script` was compared with it.
  Status replay(const EvalPrompt& prompt, PlayScript script, PlayedAnswer& out);

 private:
  class Course;
  using Sides = std::vector<std::unique_ptr<KvSession>>;
  int64_t document_of(const EvalPrompt& prompt) const;
  Status answer(const EvalPrompt& prompt, bool writes, PlayedAnswer& out);
  Status play_alone(const EvalPrompt& prompt, std::unique_ptr<KvSession>& side, PlayedAnswer& out);
  Status play_in_step(const EvalPrompt& prompt, Sides& sides, const PlayedAnswer& like, const Sink& sink);
  bool interrupted() const { return cancel_ != nullptr && cancel_->load(); }

  Session& session_;
  const Tokenizer& tokenizer_;
  PlayOptions options_;
  const std::atomic<bool>* cancel_;
  PlayScript script_;
  std::unique_ptr<BatchDecoder> batch_;
};

// "question, answer", "prompt, question, answer", "answer": what a recipe computes differently from full attention.
std::string sparse_phases(const Recipe& recipe, const PlayOptions& options);

}  // namespace longkv
