#include "eval/play.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "engine/likelihood.h"
#include "eval/scorers.h"

namespace longkv {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBuckets = 4;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

int32_t best(std::span<const float> logits) {
  return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace

// What full attention was fed after the document, and what it said after each token.
struct PromptPlayer::Script {
  std::vector<int32_t> tokens;
  std::vector<float> logits;  // [tokens][vocab]
};

Status PromptPlayer::step(int32_t id, std::vector<double>& seconds) {
  if (cancel_ != nullptr && cancel_->load()) return fail(Code::kCancelled, "interrupted");
  const int64_t checked = session_.kv().stats().checked_steps;
  const auto begin = Clock::now();
  LONGKV_TRY(session_.decode(id));
  if (session_.kv().stats().checked_steps == checked) seconds.push_back(seconds_since(begin));
  return {};
}

void PromptPlayer::measure_prompt(PlayedAnswer& out) const {
  const KvCache& cache = session_.kv().cache();
  double rows = 0;
  for (int layer = 0; layer < cache.shape().layers; ++layer) {
    for (int h = 0; h < cache.shape().kv_heads; ++h) rows += double(cache.rows(layer, h).v);
  }
  out.kept_rows = rows / double(cache.shape().layers) / double(cache.shape().kv_heads);
  out.kept_bytes = cache.bytes_used();
  out.index_bytes = session_.kv().index_bytes_held();
}

Status PromptPlayer::answer(const EvalPrompt& prompt, int64_t document, Script& script, bool writes,
                            PlayedAnswer& out) {
  const auto vocab = int64_t(session_.logits().size());
  measure_prompt(out);
  session_.kv().reset_stats();
  const bool forced = !prompt.continuation.empty();
  std::vector<double> seconds;
  std::vector<double> bucket_sums(kBuckets, 0.0);
  std::vector<int64_t> bucket_counts(kBuckets, 0);
  bool same = true;  // the tokens fed so far are those of the script
  int64_t fed = 0;
  const auto feed = [&](int32_t id) -> Status {
    if (!writes && same) {
      same = fed < int64_t(script.tokens.size()) && script.tokens[size_t(fed)] == id;
      // The reference holds no rows for tokens that full attention was never fed.
      if (!same) session_.kv().set_check_every(0);
    }
    LONGKV_TRY(step(id, seconds));
    if (writes) {
      script.tokens.push_back(id);
      script.logits.insert(script.logits.end(), session_.logits().begin(), session_.logits().end());
    } else if (same) {
      const float* full = script.logits.data() + fed * vocab;
      const double kl = kl_divergence(full, session_.logits().data(), vocab);
      ++out.compared;
      out.kl_mean += kl;
      out.kl_max = std::max(out.kl_max, kl);
      out.same_top += best({full, size_t(vocab)}) == best(session_.logits());
      if (forced) {
        const auto bucket = size_t(fed * kBuckets / int64_t(prompt.continuation.size()));
        bucket_sums[bucket] += kl;
        ++bucket_counts[bucket];
      }
    }
    ++fed;
    return {};
  };
  if (forced) {
    // The first token follows the document; its prediction is full attention's for recipes that share the reading.
    for (size_t i = 0; i < prompt.continuation.size(); ++i) {
      const int32_t id = prompt.continuation[i];
      if (i > 0) out.nll += negative_log_likelihood(session_.logits().data(), vocab, id);
      LONGKV_TRY(feed(id));
    }
    out.nll /= double(std::max<size_t>(1, prompt.continuation.size() - 1));
    out.finish = "forced";
    for (int b = 0; b < kBuckets; ++b) {
      out.kl_buckets.push_back(bucket_counts[size_t(b)] > 0 ? bucket_sums[size_t(b)] / double(bucket_counts[size_t(b)])
                                                            : 0);
    }
  } else {
    for (size_t i = size_t(document); i < prompt.ids.size(); ++i) LONGKV_TRY(feed(prompt.ids[i]));
    out.finish = "length";
    std::string text;
    while (int64_t(out.ids.size()) < prompt.new_tokens) {
      const int32_t id = best(session_.logits());
      if (tokenizer_.is_eog(id)) {
        out.finish = "eos";
        break;
      }
      out.ids.push_back(id);
      text = tokenizer_.decode(out.ids);
      if (meets_stop(text, prompt.sample.stop)) {
        out.finish = "stop";
        break;
      }
      if (int64_t(out.ids.size()) < prompt.new_tokens) LONGKV_TRY(feed(id));
    }
    out.text = std::string(cut_at_stop(text, prompt.sample.stop));
  }
  if (writes) {
    out.compared = int64_t(script.tokens.size());
    out.same_top = 1;
  } else if (out.compared > 0) {
    out.kl_mean /= double(out.compared);
    out.same_top /= double(out.compared);
  }
  const KvStats& stats = session_.kv().stats();
  const KvShape& shape = session_.kv().cache().shape();
  const auto steps = double(std::max<int64_t>(1, stats.steps));
  out.bytes_per_token = double(stats.kv_bytes + stats.index_bytes) / steps;
  out.rows_attended = double(stats.rows_attended) / steps / shape.layers / shape.kv_heads;
  out.checked = stats.checked_steps;
  if (stats.checked_steps > 0) {
    out.captured_mass = out.output_error = 0;
    const auto layers = double(stats.captured_mass.size());
    for (size_t layer = 0; layer < stats.captured_mass.size(); ++layer) {
      out.layer_mass.push_back(stats.captured_mass[layer] / double(stats.checked_steps));
      out.captured_mass += out.layer_mass.back() / layers;
      out.output_error += stats.output_error[layer] / double(stats.checked_steps) / layers;
    }
  }
  if (!seconds.empty()) {
    std::nth_element(seconds.begin(), seconds.begin() + int64_t(seconds.size() / 2), seconds.end());
    out.seconds_per_token = seconds[seconds.size() / 2];
  }
  return {};
}

Status PromptPlayer::play(const EvalPrompt& prompt, std::span<const Recipe> recipes, const PrefillProgress& progress,
                          const Sink& sink) {
  // Something is always left to decode, so that an answer's first token is the recipe's own.
  const bool forced = !prompt.continuation.empty();
  const int64_t document = options_.question_seen && !forced ? int64_t(prompt.ids.size()) - 1 : prompt.document;
  const std::span<const int32_t> read(prompt.ids.data(), size_t(document));
  LONGKV_TRY(session_.truncate(0));
  std::vector<std::unique_ptr<KvSession>> sides;
  for (const Recipe& recipe : recipes) {
    LONGKV_ASSIGN(auto side, session_.make_kv(recipe));
    sides.push_back(std::move(side));
  }
  for (auto& side : sides) {
    if (!side->changes_prompt()) session_.kv().add_follower(side.get());
  }
  auto begin = Clock::now();
  const Status prefilled = session_.prefill(read, progress, cancel_);
  session_.kv().clear_followers();
  LONGKV_TRY(prefilled);
  PlayedAnswer written;
  written.prefill_seconds = seconds_since(begin);
  written.shared_prefill = !sides.empty();
  Script script;
  LONGKV_TRY(answer(prompt, document, script, /*writes=*/true, written));
  LONGKV_TRY(sink(-1, written));
  const KvSession& full = session_.kv();
  for (size_t i = 0; i < sides.size(); ++i) {
    PlayedAnswer out;
    sides[i]->set_reference(&full);
    sides[i]->set_check_every(options_.check_every);
    session_.exchange_kv(sides[i]);
    Status played;
    out.prefill_seconds = written.prefill_seconds;
    out.shared_prefill = !session_.kv().changes_prompt();
    if (!out.shared_prefill) {
      begin = Clock::now();
      played = session_.prefill(read, progress, cancel_);
      out.prefill_seconds = seconds_since(begin);
    }
    const bool unreadable = played.code() == Code::kInvalidArgument;
    if (unreadable) {
      out.skipped = played.message();
    } else if (played.ok()) {
      played = answer(prompt, document, script, /*writes=*/false, out);
    }
    session_.exchange_kv(sides[i]);
    sides[i].reset();
    if (!unreadable) LONGKV_TRY(played);
    LONGKV_TRY(sink(int64_t(i), out));
  }
  return session_.truncate(0);
}

std::string sparse_phases(const Recipe& recipe, const PlayOptions& options) {
  if (recipe == Recipe{}) return "none";
  Recipe reads_only;
  reads_only.prefill = recipe.prefill;
  if (recipe == reads_only) return "prompt";
  const std::string after = options.question_seen ? "answer" : "question, answer";
  return recipe.prefill.kind == PrefillKind::kDense ? after : "prompt, " + after;
}

}  // namespace longkv
