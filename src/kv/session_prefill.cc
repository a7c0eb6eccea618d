// Attention of a prompt under the recipe's prefill stage.
#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "base/seconds.h"
#include "kv/session_impl.h"

namespace longkv {

double PrefillStats::density() const {
  int64_t attended = 0, causal = 0;
  for (const PrefillPairs& layer : layers) {
    attended += layer.attended;
    causal += layer.causal;
  }
  return causal > 0 ? double(attended) / double(causal) : 1.0;
}

void KvSession::begin_prompt(int layer, int64_t first, int64_t prompt_end) {
  if (prefill_stats_.layers.empty()) prefill_stats_.layers.resize(size_t(cache_.shape().layers));
  int64_t& start = impl_->prompt_start[size_t(layer)];
  if (start >= 0) return;
  start = first;
  if (layer > 0) return;
  prefill_stats_ = PrefillStats{};
  prefill_stats_.layers.resize(size_t(cache_.shape().layers));
  const PrefillSpec& spec = recipe_.prefill;
  if (spec.kind != PrefillKind::kDense && prompt_end < spec.threshold) {
    log_info("prefill: the prompt ends at {} tokens and is read densely; the pattern begins at {}", prompt_end,
             spec.threshold);
  }
}

void KvSession::attend_prompt(int layer, const PrefillAttendArgs& args, int64_t prompt_end) {
  Impl& impl = *impl_;
  const auto start = std::chrono::steady_clock::now();
  PrefillPairs pairs;
  if (impl.sparse_prefill->applies(layer, prompt_end)) {
    pairs = impl.sparse_prefill->run(args, layer, prompt_end, impl.prefill_attention, impl.pool);
  } else {
    impl.prefill_attention.run(args);
    pairs.attended = pairs.causal = dense_pairs(args);
  }
  PrefillPairs& sum = prefill_stats_.layers[size_t(layer)];
  sum.attended += pairs.attended;
  sum.causal += pairs.causal;
  prefill_stats_.seconds_attend += seconds_since(start);
  if (prefill_observer_) prefill_observer_(layer, args, prompt_end);
  // Rows behind a sliding window go at once, so that a layer holds its window and a chunk of a long prompt. Those of an
  // earlier prompt stay until this one is complete: an interrupted prompt must leave them as they were. A layer with an
  // index is summarised at the prompt's end, which reads all rows.
  if (impl.prompt_start[size_t(layer)] == 0 && impl.plans[size_t(layer)].role == LayerRole::kDense) {
    cache_.release_outside_window(layer);
  }
}

}  // namespace longkv
