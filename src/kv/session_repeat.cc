// Keep stages that read the prompt again before they drop anything.
#include <algorithm>

#include "base/error.h"
#include "kv/session_impl.h"

namespace longkv {

int64_t KvSession::repeat_chunk() const { return impl_->keeper ? impl_->keep_needs.repeat_chunk : 0; }

void KvSession::begin_repeat(int64_t prompt_begin, RowRange piece) {
  impl_->repeat = {prompt_begin, piece, tokens().v};
}

void KvSession::score_repeat(int layer, const float* q, int64_t n) {
  Impl& impl = *impl_;
  const int64_t repeated = cache_.tokens(layer).v - impl.repeat.from;
  std::vector<int64_t> first(impl.views.size());
  std::vector<RowRange> context(impl.views.size()), input(impl.views.size());
  for (size_t h = 0; h < impl.views.size(); ++h) {
    input[h] = {impl.views[h].rows - repeated, impl.views[h].rows};
    // The prompt's rows are the last ones before the repeating input.
    first[h] = input[h].begin - (impl.repeat.from - impl.repeat.prompt_begin);
    context[h] = {first[h] + impl.repeat.piece.begin - impl.repeat.prompt_begin,
                  first[h] + impl.repeat.piece.end - impl.repeat.prompt_begin};
  }
  KeepRepeat chunk;
  chunk.layer = layer;
  chunk.heads = impl.views;
  chunk.first_row = first;
  chunk.context = context;
  chunk.input = input;
  chunk.q = q;
  chunk.tokens = n;
  chunk.params = impl.params;
  chunk.pool = &impl.pool;
  impl.keeper->repeated(chunk);
}

Status KvSession::end_repeat() {
  const int64_t from = impl_->repeat.from;
  impl_->repeat = {};
  // The repeating input began a prompt in every layer that nothing else ends.
  std::fill(impl_->prompt_start.begin(), impl_->prompt_start.end(), -1);
  return cache_.truncate(TokenCount{from});
}

Status KvSession::finish_repeats() {
  Impl& impl = *impl_;
  std::vector<KeepChoice> choices(size_t(cache_.shape().layers));
  LONGKV_TRY(impl.keeper->choose_all(cache_, choices));
  for (int layer = 0; layer < cache_.shape().layers; ++layer) {
    if (evicts(layer)) LONGKV_TRY(cache_.compact(layer, choices[size_t(layer)].rows, impl.pool));
  }
  return {};
}

}  // namespace longkv
