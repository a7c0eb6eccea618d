#include "engine/compare_recipes.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/error.h"
#include "base/seconds.h"
#include "engine/likelihood.h"

namespace longkv {

namespace {

using Clock = std::chrono::steady_clock;

int32_t best(std::span<const float> logits) {
  return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The steps that all recipes take, and what full attention says after each.
struct Script {
  std::vector<int32_t> tokens;
  std::vector<float> logits;  // [steps][vocab]
};

class Comparison {
 public:
  Comparison(Session& session, const CompareOptions& options, const std::atomic<bool>* cancel)
      : session_(session), options_(options), cancel_(cancel), vocab_(int64_t(session.logits().size())) {}

  // Full attention writes the script.
  Status write(RecipeReport& report) {
    int32_t next = best(session_.logits());
    for (int64_t i = 0; i < options_.steps; ++i) {
      const bool given = i < int64_t(options_.continuation.size());
      script_.tokens.push_back(given ? options_.continuation[size_t(i)] : next);
      LONGKV_TRY(step(i));
      script_.logits.insert(script_.logits.end(), session_.logits().begin(), session_.logits().end());
      next = best(session_.logits());
    }
    summarise(report);
    report.captured_mass = report.same_top = 1;
    return {};
  }

  // The session's present KV side plays it.
  Status play(RecipeReport& report) {
    double same = 0;
    for (int64_t i = 0; i < options_.steps; ++i) {
      LONGKV_TRY(step(i));
      const float* full = script_.logits.data() + i * vocab_;
      const double kl = kl_divergence(full, session_.logits().data(), vocab_);
      report.kl_mean += kl / double(options_.steps);
      report.kl_max = std::max(report.kl_max, kl);
      same += best({full, size_t(vocab_)}) == best(session_.logits());
    }
    report.same_top = same / double(options_.steps);
    summarise(report);
    return {};
  }

  // What the KV side holds after the prompt.
  static void measure_prompt(const KvSession& kv, RecipeReport& report) {
    const KvShape& shape = kv.cache().shape();
    double rows = 0;
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int h = 0; h < shape.kv_heads; ++h) rows += double(kv.cache().rows(layer, h).v);
    }
    report.kept_rows = rows / double(shape.layers) / double(shape.kv_heads);
    report.kept_bytes = kv.cache().bytes_used();
    report.index_bytes_held = kv.index_bytes_held();
  }

 private:
  Status step(int64_t i) {
    if (i == 0) {
      seconds_.clear();
      nll_ = 0;
      session_.kv().reset_stats();
    }
    if (cancel_ != nullptr && cancel_->load()) return fail(Code::kCancelled, "interrupted");
    // What was said before the token is fed.
    if (i > 0) nll_ += negative_log_likelihood(session_.logits().data(), vocab_, script_.tokens[size_t(i)]);
    const int64_t checked = session_.kv().stats().checked_steps;
    const auto begin = Clock::now();
    LONGKV_TRY(session_.decode(script_.tokens[size_t(i)]));
    if (session_.kv().stats().checked_steps == checked) {
      seconds_.push_back(seconds_since(begin));
    }
    return {};
  }

  void summarise(RecipeReport& report) {
    if (options_.steps > 1) report.perplexity = std::exp(nll_ / double(options_.steps - 1));
    const KvStats& stats = session_.kv().stats();
    report.bytes_per_token = double(stats.kv_bytes + stats.index_bytes) / double(std::max<int64_t>(1, stats.steps));
    if (stats.checked_steps > 0) {
      for (size_t layer = 0; layer < stats.captured_mass.size(); ++layer) {
        const double share = 1.0 / (double(stats.checked_steps) * double(stats.captured_mass.size()));
        report.captured_mass += stats.captured_mass[layer] * share;
        report.output_error += stats.output_error[layer] * share;
      }
    }
    if (!seconds_.empty()) {
      std::nth_element(seconds_.begin(), seconds_.begin() + int64_t(seconds_.size() / 2), seconds_.end());
      report.seconds_per_token = seconds_[seconds_.size() / 2];
    }
  }

  Session& session_;
  const CompareOptions& options_;
  const std::atomic<bool>* cancel_;
  const int64_t vocab_;
  Script script_;
  std::vector<double> seconds_;
  double nll_ = 0;  // nats, of one recipe's steps
};

}  // namespace

Result<std::vector<RecipeReport>> compare_recipes(Session& session, std::span<const Recipe> recipes,
                                                  std::span<const int32_t> prompt, const CompareOptions& options,
                                                  const PrefillProgress& progress, const std::atomic<bool>* cancel) {
  if (session.tokens() != 0)
    return fail(Code::kInvalidArgument, "the session holds {} tokens already", session.tokens());
  if (prompt.empty() || options.steps < 1 || options.check_every < 2) {
    return fail(Code::kInvalidArgument,
                "a comparison needs a prompt, steps (found {}) and a check every 2 or more of them (found {})",
                options.steps, options.check_every);
  }
  if (int64_t(prompt.size()) + options.steps > session.context()) {
    return fail(Code::kInvalidArgument, "{} tokens of prompt and {} steps do not fit the context of {}", prompt.size(),
                options.steps, session.context());
  }
  std::vector<RecipeReport> reports(recipes.size() + 1);
  reports[0].kv = session.kv().recipe().canonical();
  reports[0].label = session.kv().recipe().name;
  std::vector<std::unique_ptr<KvSession>> sides;
  for (size_t i = 0; i < recipes.size(); ++i) {
    reports[i + 1].kv = recipes[i].canonical();
    reports[i + 1].label = recipes[i].name == "custom" ? reports[i + 1].kv : recipes[i].name;
    LONGKV_ASSIGN(auto side, session.make_kv(recipes[i]));
    if (!side->changes_prompt()) session.kv().add_follower(side.get());
    sides.push_back(std::move(side));
  }
  LONGKV_TRY(session.prefill(prompt, progress, cancel));
  session.kv().clear_followers();
  Comparison comparison(session, options, cancel);
  Comparison::measure_prompt(session.kv(), reports[0]);
  LONGKV_TRY(comparison.write(reports[0]));

  const KvSession& full = session.kv();
  for (size_t i = 0; i < recipes.size(); ++i) {
    sides[i]->set_reference(&full);
    sides[i]->set_check_every(options.check_every);
    session.exchange_kv(sides[i]);  // the reference lives on in sides[i]
    Status played;
    if (session.kv().changes_prompt()) played = session.prefill(prompt, progress, cancel);
    if (played.ok()) {
      Comparison::measure_prompt(session.kv(), reports[i + 1]);
      played = comparison.play(reports[i + 1]);
    }
    session.exchange_kv(sides[i]);
    sides[i].reset();
    LONGKV_TRY(played);
  }
  return reports;
}

}  // namespace longkv
