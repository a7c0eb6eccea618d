// From a sample to tokens: the model's template around it, the place where the question begins, and, for generated
// tasks, the size that fills a length. A prompt is never cut.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "chat/chat.h"
#include "eval/sample.h"
#include "eval/tasks.h"
#include "longkv/status.h"
#include "tokenizer/tokenizer.h"

namespace longkv {

struct EvalPrompt {
  EvalSample sample;
  std::vector<int32_t> ids;  // the whole prompt, answer prefix included
  int64_t document = 0;      // tokens before the question; what a hidden question lets a recipe see
  int64_t new_tokens = 0;    // cap on the answer, or tokens of the continuation
  std::vector<int32_t> continuation;
  double depth = -1;  // percent of the document's tokens before the first fact; -1: no fact
  int64_t units = 0;  // size of a generated sample

  int64_t tokens() const { return int64_t(ids.size()) + new_tokens; }
  uint64_t hash() const;  // of ids and `document`
};

class PromptMaker {
 public:
  // Without `chat`, or for samples that forbid it: BOS and the texts as they are.
  PromptMaker(Tokenizer tokenizer, std::optional<Chat> chat)
      : tokenizer_(std::move(tokenizer)), chat_(std::move(chat)) {}

  // Errors: kInternal when a fact, the question's key or the border between document and question was lost on the way
  // to tokens; kInvalidArgument for a text that the vocabulary cannot write.
  Result<EvalPrompt> encode(EvalSample sample) const;

  // The largest sample whose prompt and answer together take at most request.id.length tokens: it falls short by less
  // than one unit. Errors: kInvalidArgument when even the smallest takes more.
  Result<EvalPrompt> fit(const EvalTask& task, const TaskRequest& request) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }
  const Chat* chat() const { return chat_ ? &*chat_ : nullptr; }

 private:
  Result<std::vector<int32_t>> render(const EvalSample& sample, const std::string& text) const;
  Status check(EvalPrompt& prompt) const;

  Tokenizer tokenizer_;
  std::optional<Chat> chat_;
};

}  // namespace longkv
