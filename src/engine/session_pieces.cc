// Reading a prompt in pieces of work, so that other sequences can go on in between.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/session.h"
#include "kv/prefix/reuse.h"
#include "prefill/sparse.h"

namespace longkv {

bool keeps_prefixes(const Recipe& recipe) {
  const PrefixReuse reuse = prefix_reuse(recipe);
  return reuse.any_length && !reuse.rebuild;
}

Status Session::start_prompt(std::span<const int32_t> ids, LogitsSink sink) {
  if (ids.empty()) return fail(Code::kInvalidArgument, "a prompt needs at least one token");
  if (device_) return fail(Code::kUnsupported, "a card reads prompts as a whole, not in pieces");
  LONGKV_TRY(check_prompt(ids));
  const int64_t start = tokens(), end = start + int64_t(ids.size());
  prompt_ = Prompt{.ids = {ids.begin(), ids.end()}, .start = start, .sink = std::move(sink)};
  prompt_->joins = origin_.exact == start && resume_point(start, end) == start;
  ids_.resize(size_t(start));
  return {};
}

// Tokens of the next chunk, of which the uncut one would have `full`.
int64_t Session::cut_chunk(int64_t position, int64_t full, int64_t at_most) const {
  if (at_most >= full || !free_pieces() || !keeps_prefixes()) return full;
  // Never so few tokens that they take the kernels of single tokens, which add in another order.
  int64_t end = (position + at_most) / kPieceTokens * kPieceTokens;
  if (end - position <= kFewTokens) end = (position + kFewTokens) / kPieceTokens * kPieceTokens + kPieceTokens;
  return full - (end - position) <= kFewTokens ? full : end - position;
}

Result<bool> Session::read_piece(const std::atomic<bool>* cancel, int64_t at_most) {
  if (!prompt_) return fail(Code::kInternal, "no prompt was started");
  Prompt& p = *prompt_;
  const ModelConfig& c = model().config();
  const int64_t n = int64_t(p.ids.size());
  const int64_t position = p.start + p.done;
  const std::span<const int32_t> rest = std::span(p.ids).subspan(size_t(p.done));
  if (p.layer == 0) {
    const int64_t chunk = SparsePrefill::chunk_tokens(kv_->recipe().prefill, options_.chunk, options_.context);
    p.count = cut_chunk(position, std::min(n - p.done, chunk - position % chunk), at_most);
    if (hidden_.size() < size_t(p.count * c.dim)) hidden_.resize(size_t(p.count * c.dim));
    LONGKV_TRY(graph_.embed(rest.data(), p.count, hidden_.data()));
    LONGKV_TRY(note_classes(rest.first(size_t(p.count))));
    LONGKV_TRY(score_chunk(rest.first(size_t(p.count)), p.start + n));
  }
  const bool last_chunk = p.done + p.count == n;
  LONGKV_TRY(graph_.prefill_layer(p.layer, *kv_, hidden_.data(), p.count, position, p.start + n, cancel));
  if (last_chunk) LONGKV_TRY(kv_->finish_prefill(p.layer));
  if (++p.layer < c.layers) return false;
  if (p.sink) deliver(p.sink, p.done, p.count, hidden_.data());
  ids_.insert(ids_.end(), rest.begin(), rest.begin() + p.count);
  p.layer = 0;
  p.done += p.count;
  if (!last_chunk) return false;
  scorer_.reset();
  graph_.logits(hidden_.data() + (p.count - 1) * c.dim, 1, logits_.data());
  LONGKV_TRY(check_logits());
  note_prompt(p.start, p.start + n);
  if (kv_->repeat_chunk() > 0) LONGKV_TRY(repeat_prompt(p.ids, p.start, cancel));
  prompt_.reset();
  return true;
}

void Session::drop_prompt() {
  if (!prompt_) return;
  const int64_t start = prompt_->start, whole = start + prompt_->done;
  const int64_t keep = keeps_prefixes() ? whole : start;
  const bool joins = prompt_->joins;
  prompt_.reset();
  scorer_.reset();
  // Windows and eviction may have let go of rows that the shorter sequence needs; an empty one is always possible.
  const bool kept = kv_->truncate(TokenCount{keep}).ok();
  if (!kept) (void)kv_->truncate(TokenCount{0});
  ids_.resize(size_t(kept ? keep : 0));
  const int64_t exact = joins ? keep : origin_.exact;
  origin_ = Origin{kept ? std::min(exact, keep) : 0, false, false};
}

}  // namespace longkv
