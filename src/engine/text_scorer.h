// Log-likelihoods of given continuations, and greedy answers, for harnesses that ask one question after another.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/session.h"
#include "longkv/status.h"
#include "tokenizer/tokenizer.h"

namespace longkv {

struct ScoredContinuation {
  int64_t tokens = 0;         // that were scored
  double log_likelihood = 0;  // of all of them, in nats
  bool greedy = true;         // whether each was the likeliest
};

struct GreedyAnswer {
  std::string text;  // before the stop
  int64_t tokens = 0;
  std::string finish;  // "eos", "stop", "length"
};

// A prompt is read, the continuation decoded under the session's recipe; with full attention both are read at once,
// which gives the same within rounding. What the next prompt has in common with the one before is kept where the recipe
// allows (Session::keeps_prefixes()).
class TextScorer {
 public:
  TextScorer(Session& session, const Tokenizer& tokenizer, const std::atomic<bool>* cancel);

  // Both texts are made tokens as one; what comes after as many tokens as the prompt alone has is the continuation, as
  // lm-eval cuts. An empty prompt stands for BOS, or EOS where the vocabulary has none.
  // Errors: kInvalidArgument (nothing to score; more tokens than the context: nothing is ever cut).
  Result<ScoredContinuation> score(const std::string& prompt, const std::string& continuation);
  // A text of any length after BOS, in windows of the context that do not overlap: each but the first is given one
  // token of the window before.
  Result<ScoredContinuation> score_rolling(const std::string& text);
  // A text of which the first `skip` tokens, BOS included, are read and not scored; as `count` counts them.
  Result<ScoredContinuation> score_after(const std::string& text, int64_t skip);
  // Tokens of a text, BOS included where the vocabulary puts one before it.
  Result<int64_t> count(const std::string& text) const;
  // Greedy; ends before any of `stops` (empty ones do not count).
  Result<GreedyAnswer> answer(const std::string& prompt, std::span<const std::string> stops, int64_t max_tokens);

 private:
  Result<std::vector<int32_t>> tokens_of(const std::string& text) const;
  Result<ScoredContinuation> score_ids(std::span<const int32_t> prompt, std::span<const int32_t> continuation);
  // Holds exactly `ids` afterwards.
  Status hold(std::span<const int32_t> ids);
  Status cut_to_common(std::span<const int32_t> ids, int64_t at_most);
  void note(const float* logits, int32_t next, ScoredContinuation& out) const;

  Session& session_;
  const Tokenizer& tokenizer_;
  const std::atomic<bool>* cancel_;
};

}  // namespace longkv
