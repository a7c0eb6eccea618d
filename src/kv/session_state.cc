// A KV session as saved and restored.
#include <algorithm>

#include "base/error.h"
#include "kv/session_impl.h"

namespace longkv {

void KvSession::visit(KvState& state, bool rows_only) {
  Impl& impl = *impl_;
  const auto reading = [](int64_t start) { return start >= 0; };
  if (std::any_of(impl.prompt_start.begin(), impl.prompt_start.end(), reading) || impl.repeat.prompt_begin >= 0) {
    return state.refuse(Code::kInternal, "a KV session is saved or restored while it reads a prompt");
  }
  if (state.loading() && tokens().v != 0) {
    return state.refuse(Code::kInternal, "a KV session that holds tokens is restored");
  }
  {
    const KvState::Level level(state, "cache");
    cache_.visit(state);
  }
  if (rows_only) return;
  state.value("step", impl.step);
  if (!state.expect(impl.step >= -1 && impl.step < tokens().v + 1, "the number of steps")) return;
  {
    const KvState::Level level(state, "select");
    impl.selector->visit_levels(state);
    for (int layer = 0; layer < cache_.shape().layers && state.ok(); ++layer) {
      const KvState::Level in_layer(state, "l", layer);
      load_views(layer);
      impl.selector->visit(state, layer, impl.views);
    }
  }
  if (impl.keeper && state.ok()) {
    const KvState::Level level(state, "keep");
    impl.keeper->visit(state, cache_);
  }
}

void KvSession::index_rows() {
  Impl& impl = *impl_;
  const int64_t rows = tokens().v;
  for (int layer = 0; layer < cache_.shape().layers; ++layer) {
    load_views(layer);
    impl.selector->append(layer, impl.views, 0, rows, impl.pool);
  }
}

}  // namespace longkv
