#include "eval/prompt.h"

#include <xxhash.h>

#include <algorithm>

#include "base/error.h"

namespace longkv {

namespace {

// Units that tell how many tokens one takes, at first.
constexpr int64_t kPilotUnits = 64;

}  // namespace

uint64_t EvalPrompt::hash() const { return XXH64(ids.data(), ids.size() * sizeof(int32_t), uint64_t(document)); }

Result<std::vector<int32_t>> PromptMaker::render(const EvalSample& sample, const std::string& text) const {
  if (!chat_ || !sample.chat) return tokenizer_.encode(text, /*add_special=*/true, /*parse_special=*/false);
  const ChatMessage message{"user", text};
  return chat_->encode({&message, 1}, /*generation_prompt=*/true);
}

Result<EvalPrompt> PromptMaker::encode(EvalSample sample) const {
  EvalPrompt prompt;
  const bool templated = chat_ && sample.chat;
  if (sample.metric == EvalMetric::kNegativeLogLikelihood) {
    LONGKV_ASSIGN(prompt.ids, render(sample, sample.context));
    LONGKV_ASSIGN(prompt.continuation, tokenizer_.encode(sample.continuation, false, false));
    if (int64_t(prompt.continuation.size()) > sample.new_tokens) prompt.continuation.resize(size_t(sample.new_tokens));
    prompt.new_tokens = int64_t(prompt.continuation.size());
    prompt.document = int64_t(prompt.ids.size());
    prompt.sample = std::move(sample);
    return prompt;
  }
  // The prompt is tokenised as a whole; where its tokens part from those of the document alone, the question begins. So
  // no token at the seam differs from what the model would be given otherwise. (An EOS that the vocabulary appends, or
  // the template's end of turn, is not a part of the document.)
  LONGKV_ASSIGN(prompt.ids, render(sample, sample.context + sample.question + (templated ? "" : sample.answer_prefix)));
  LONGKV_ASSIGN(const std::vector<int32_t> document, render(sample, sample.context));
  const auto [first, second] = std::mismatch(prompt.ids.begin(), prompt.ids.end(), document.begin(), document.end());
  prompt.document = first - prompt.ids.begin();
  if (templated && !sample.answer_prefix.empty()) {
    LONGKV_ASSIGN(const auto prefix, tokenizer_.encode(sample.answer_prefix, false, false));
    prompt.ids.insert(prompt.ids.end(), prefix.begin(), prefix.end());
  }
  prompt.new_tokens = sample.new_tokens;
  if (prompt.new_tokens == 0) {
    for (const std::string& reference : sample.references) {
      LONGKV_ASSIGN(const auto ids, tokenizer_.encode(" " + reference, false, false));
      prompt.new_tokens += int64_t(ids.size()) + 1;  // and what separates it from the next
    }
    prompt.new_tokens += kAnswerSlack;
  }
  prompt.sample = std::move(sample);
  LONGKV_TRY(check(prompt));
  return prompt;
}

Status PromptMaker::check(EvalPrompt& prompt) const {
  const EvalSample& s = prompt.sample;
  if (prompt.document < 1 || prompt.document >= int64_t(prompt.ids.size())) {
    return fail(Code::kInternal, "a prompt of {} has {} tokens of which {} are the document: nothing is asked",
                s.id.task, prompt.ids.size(), prompt.document);
  }
  const std::span<const int32_t> ids(prompt.ids);
  const std::string document = tokenizer_.decode(ids.first(size_t(prompt.document)), true);
  const std::string question = tokenizer_.decode(ids.subspan(size_t(prompt.document)), true);
  for (const std::string& fact : s.facts) {
    const size_t at = document.find(fact);
    if (at == std::string::npos) {
      return fail(Code::kInternal, "the tokens of a prompt of {} do not hold '{}' before the question", s.id.task,
                  fact);
    }
    if (prompt.depth >= 0) continue;
    size_t bytes = 0;
    int64_t before = 0;
    while (before < prompt.document && bytes < at) bytes += tokenizer_.piece(ids[size_t(before++)]).size();
    prompt.depth = 100.0 * double(before) / double(prompt.document);
  }
  if (!s.asked.empty() && question.find(s.asked) == std::string::npos) {
    return fail(Code::kInternal, "the tokens after the document of a prompt of {} do not hold '{}'", s.id.task,
                s.asked);
  }
  return {};
}

Result<EvalPrompt> PromptMaker::fit(const EvalTask& task, const TaskRequest& request) const {
  const int64_t length = request.id.length;
  const auto build = [&](int64_t units) -> Result<EvalPrompt> {
    EvalSample sample = task.build(request, units);
    sample.id = request.id;
    LONGKV_ASSIGN(EvalPrompt prompt, encode(std::move(sample)));
    prompt.units = units;
    return prompt;
  };
  LONGKV_ASSIGN(EvalPrompt best, build(task.min_units));
  if (best.tokens() > length) {
    return fail(Code::kInvalidArgument, "{} needs at least {} tokens with its answer, {} are asked for", task.name,
                best.tokens(), length);
  }
  // `best` fits, `above` units do not. Guesses follow tokens per unit; where they stop helping, halving does.
  int64_t above = task.max_units + 1, above_tokens = 0;
  int64_t guess = std::min(task.min_units + kPilotUnits, task.max_units);
  for (int round = 0; best.units + 1 < above; ++round) {
    LONGKV_ASSIGN(EvalPrompt tried, build(guess));
    const double slope = std::max(0.01, double(tried.tokens() - best.tokens()) / double(tried.units - best.units));
    if (tried.tokens() <= length) {
      best = std::move(tried);
    } else {
      above = guess;
      above_tokens = tried.tokens();
    }
    const double per_unit =
        above_tokens > 0 ? double(above_tokens - best.tokens()) / double(above - best.units) : slope;
    const double more = double(length - best.tokens()) / std::max(0.01, per_unit);
    guess = best.units + std::max<int64_t>(1, int64_t(std::min(more, 1e15)));
    if (round > 8 && above <= task.max_units) guess = best.units + (above - best.units) / 2;
    guess = std::clamp(guess, best.units + 1, std::max(best.units + 1, above - 1));
  }
  return best;
}

}  // namespace longkv
