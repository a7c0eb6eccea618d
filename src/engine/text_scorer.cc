#include "engine/text_scorer.h"

#include <algorithm>

#include "base/error.h"
#include "engine/likelihood.h"

namespace longkv {

namespace {

int32_t best(const float* logits, int64_t vocab) { return int32_t(std::max_element(logits, logits + vocab) - logits); }

}  // namespace

TextScorer::TextScorer(Session& session, const Tokenizer& tokenizer, const std::atomic<bool>* cancel)
    : session_(session), tokenizer_(tokenizer), cancel_(cancel) {}

Result<std::vector<int32_t>> TextScorer::tokens_of(const std::string& text) const {
  LONGKV_ASSIGN(std::vector<int32_t> ids, tokenizer_.encode(text, /*add_special=*/true, /*parse_special=*/true));
  if (ids.empty()) {
    const std::optional<int32_t> start = tokenizer_.bos() ? tokenizer_.bos() : tokenizer_.eos();
    if (!start) return fail(Code::kInvalidArgument, "an empty prompt, and the vocabulary has neither BOS nor EOS");
    ids.push_back(*start);
  }
  return ids;
}

// What is held and does not begin `ids`, or lies past `at_most`, is forgotten.
Status TextScorer::cut_to_common(std::span<const int32_t> ids, int64_t at_most) {
  const std::vector<int32_t>& held = session_.ids();
  int64_t common = 0;
  if (session_.keeps_prefixes() && int64_t(held.size()) == session_.tokens()) {
    const int64_t end = std::min({int64_t(held.size()), int64_t(ids.size()), at_most});
    while (common < end && held[size_t(common)] == ids[size_t(common)]) ++common;
  }
  return session_.truncate(common);
}

Status TextScorer::hold(std::span<const int32_t> ids) {
  // The last token is always read again: its logits are wanted.
  LONGKV_TRY(cut_to_common(ids, int64_t(ids.size()) - 1));
  return session_.prefill(ids.subspan(size_t(session_.tokens())), {}, cancel_);
}

void TextScorer::note(const float* logits, int32_t next, ScoredContinuation& out) const {
  const int64_t vocab = session_.model().config().vocab;
  out.log_likelihood -= negative_log_likelihood(logits, vocab, next);
  out.greedy = out.greedy && best(logits, vocab) == next;
  ++out.tokens;
}

Result<ScoredContinuation> TextScorer::score_ids(std::span<const int32_t> prompt,
                                                 std::span<const int32_t> continuation) {
  if (continuation.empty()) return fail(Code::kInvalidArgument, "the continuation has no token to score");
  const auto n = int64_t(prompt.size()), m = int64_t(continuation.size());
  if (n + m - 1 > session_.context()) {
    return fail(Code::kInvalidArgument, "{} tokens of prompt and {} of continuation do not fit the context of {}", n, m,
                session_.context());
  }
  ScoredContinuation out;
  if (session_.kv().recipe() != Recipe{}) {
    LONGKV_TRY(hold(prompt));
    for (int64_t i = 0; i < m; ++i) {
      note(session_.logits().data(), continuation[size_t(i)], out);
      if (i + 1 == m) break;
      if (cancel_ != nullptr && cancel_->load()) return fail(Code::kCancelled, "interrupted");
      LONGKV_TRY(session_.decode(continuation[size_t(i)]));
    }
    return out;
  }
  std::vector<int32_t> ids(prompt.begin(), prompt.end());
  ids.insert(ids.end(), continuation.begin(), continuation.end() - 1);
  LONGKV_TRY(cut_to_common(ids, n - 1));
  const int64_t held = session_.tokens(), vocab = session_.model().config().vocab;
  LONGKV_TRY(session_.prefill(
      std::span<const int32_t>(ids).subspan(size_t(held)), {}, cancel_,
      [&](int64_t first, int64_t count, const float* logits) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = held + first + i - (n - 1);
          if (at >= 0) note(logits + i * vocab, continuation[size_t(at)], out);
        }
      },
      n - 1 - held));
  return out;
}

Result<ScoredContinuation> TextScorer::score(const std::string& prompt, const std::string& continuation) {
  LONGKV_ASSIGN(const std::vector<int32_t> before, tokens_of(prompt));
  std::vector<int32_t> whole = before;
  LONGKV_ASSIGN(const std::vector<int32_t> joined, tokenizer_.encode(prompt + continuation, true, true));
  // An empty prompt of a vocabulary without BOS stands before the text.
  const bool added = prompt.empty() && (joined.empty() || joined.front() != before.front());
  if (added) {
    whole.insert(whole.end(), joined.begin(), joined.end());
  } else {
    whole = joined;
  }
  const size_t n = std::min(before.size(), whole.size());
  return score_ids(std::span<const int32_t>(whole).first(n), std::span<const int32_t>(whole).subspan(n));
}

Result<ScoredContinuation> TextScorer::score_rolling(const std::string& text) {
  LONGKV_ASSIGN(const std::vector<int32_t> start, tokens_of(""));
  LONGKV_ASSIGN(std::vector<int32_t> ids, tokenizer_.encode(text, /*add_special=*/false, /*parse_special=*/false));
  ids.insert(ids.begin(), start.front());
  const std::span<const int32_t> all(ids);
  ScoredContinuation out;
  // A window's first token is given; as many as the context holds are scored after it.
  for (size_t at = 0; at + 1 < ids.size(); at += size_t(session_.context())) {
    const size_t n = std::min(size_t(session_.context()), ids.size() - 1 - at);
    LONGKV_ASSIGN(const ScoredContinuation part, score_ids(all.subspan(at, 1), all.subspan(at + 1, n)));
    out.tokens += part.tokens;
    out.log_likelihood += part.log_likelihood;
    out.greedy = out.greedy && part.greedy;
  }
  if (out.tokens == 0) return fail(Code::kInvalidArgument, "the text has no token to score");
  return out;
}

Result<ScoredContinuation> TextScorer::score_after(const std::string& text, int64_t skip) {
  LONGKV_ASSIGN(const std::vector<int32_t> ids, tokens_of(text));
  if (skip < 1 || skip >= int64_t(ids.size())) {
    return fail(Code::kInvalidArgument,
                "{} of the text's {} tokens cannot be left out: at least one is read, and one scored", skip,
                ids.size());
  }
  const std::span<const int32_t> all(ids);
  return score_ids(all.first(size_t(skip)), all.subspan(size_t(skip)));
}

Result<int64_t> TextScorer::count(const std::string& text) const {
  LONGKV_ASSIGN(const std::vector<int32_t> ids, tokenizer_.encode(text, /*add_special=*/true, /*parse_special=*/true));
  return int64_t(ids.size());
}

Result<GreedyAnswer> TextScorer::answer(const std::string& prompt, std::span<const std::string> stops,
                                        int64_t max_tokens) {
  LONGKV_ASSIGN(const std::vector<int32_t> ids, tokens_of(prompt));
  if (int64_t(ids.size()) + max_tokens > session_.context()) {
    return fail(Code::kInvalidArgument, "{} tokens of prompt and {} of answer do not fit the context of {}", ids.size(),
                max_tokens, session_.context());
  }
  LONGKV_TRY(hold(ids));
  GreedyAnswer out;
  out.finish = "length";
  std::vector<int32_t> said;
  while (int64_t(said.size()) < max_tokens) {
    const int32_t id = best(session_.logits().data(), int64_t(session_.logits().size()));
    if (tokenizer_.is_eog(id)) {
      out.finish = "eos";
      break;
    }
    said.push_back(id);
    out.text = tokenizer_.decode(said);
    size_t end = std::string::npos;
    for (const std::string& stop : stops) {
      if (!stop.empty()) end = std::min(end, out.text.find(stop));
    }
    if (end != std::string::npos) {
      out.text.resize(end);
      out.finish = "stop";
      break;
    }
    if (int64_t(said.size()) == max_tokens) break;
    if (cancel_ != nullptr && cancel_->load()) return fail(Code::kCancelled, "interrupted");
    LONGKV_TRY(session_.decode(id));
  }
  out.tokens = int64_t(said.size());
  return out;
}

}  // namespace longkv
