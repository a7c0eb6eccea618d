#include "eval/play.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/seconds.h"
#include "engine/likelihood.h"
#include "eval/scorers.h"

namespace longkv {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBuckets = 4;

int32_t best(std::span<const float> logits) {
  return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

void measure_prompt(const KvSession& kv, PlayedAnswer& out) {
  const KvCache& cache = kv.cache();
  double rows = 0;
  for (int layer = 0; layer < cache.shape().layers; ++layer) {
    for (int h = 0; h < cache.shape().kv_heads; ++h) rows += double(cache.rows(layer, h).v);
  }
  out.kept_rows = rows / double(cache.shape().layers) / double(cache.shape().kv_heads);
  out.kept_bytes = cache.bytes_used();
  out.index_bytes = kv.index_bytes_held();
}

double kv_seconds_per_step(const KvStats& stats) {
  return (stats.seconds_select + stats.seconds_attend) / double(std::max<int64_t>(1, stats.steps));
}

void measure_decode(const KvSession& kv, PlayedAnswer& out) {
  const KvStats& stats = kv.stats();
  const KvShape& shape = kv.cache().shape();
  const auto steps = double(std::max<int64_t>(1, stats.steps));
  out.bytes_per_token = double(stats.kv_bytes + stats.index_bytes) / steps;
  out.rows_attended = double(stats.rows_attended) / steps / shape.layers / shape.kv_heads;
  out.checked = stats.checked_steps;
  if (stats.checked_steps == 0) return;
  out.captured_mass = out.output_error = 0;
  const auto layers = double(stats.captured_mass.size()), checked = double(stats.checked_steps);
  for (size_t layer = 0; layer < stats.captured_mass.size(); ++layer) {
    out.layer_mass.push_back(stats.captured_mass[layer] / checked);
    out.captured_mass += out.layer_mass.back() / layers;
    out.output_error += stats.output_error[layer] / checked / layers;
  }
  for (const double mass : stats.head_mass) out.head_mass.push_back(mass / checked);
}

}  // namespace

// One recipe's way through question and answer: which token comes next, and what is noted after it.
class PromptPlayer::Course {
 public:
  // `writes`: full attention, whose tokens and logits make the script.
  Course(const EvalPrompt& prompt, int64_t document, const Tokenizer& tokenizer, PlayScript& script, bool writes,
         PlayedAnswer& out)
      : prompt_(prompt),
        tokenizer_(tokenizer),
        script_(script),
        writes_(writes),
        forced_(!prompt.continuation.empty()),
        out_(out) {
    given_ = forced_ ? std::span<const int32_t>(prompt.continuation)
                     : std::span<const int32_t>(prompt.ids).subspan(size_t(document));
    if (forced_) bucket_counts_.assign(kBuckets, 0), out_.kl_buckets.assign(kBuckets, 0.0);
  }

  // Nothing: the answer is complete. `logits` followed the last token; the first one is always given.
  std::optional<int32_t> next(std::span<const float> logits) {
    if (fed_ < int64_t(given_.size())) {
      const int32_t id = given_[size_t(fed_)];
      // The first token's prediction would be full attention's for recipes that share the reading.
      if (forced_ && fed_ > 0) out_.nll += negative_log_likelihood(logits.data(), int64_t(logits.size()), id);
      return id;
    }
    if (forced_) {
      out_.finish = "forced";
      return {};
    }
    out_.finish = "length";
    if (int64_t(out_.ids.size()) >= prompt_.new_tokens) return {};
    const int32_t id = best(logits);
    if (tokenizer_.is_eog(id)) {
      out_.finish = "eos";
      return {};
    }
    out_.ids.push_back(id);
    text_ = tokenizer_.decode(out_.ids);
    if (meets_stop(text_, prompt_.sample.stop)) {
      out_.finish = "stop";
      return {};
    }
    if (int64_t(out_.ids.size()) >= prompt_.new_tokens) return {};
    return id;
  }

  // Before next()'s token is fed: whether it is the script's, as all before it. After the first other one checks make
  // no sense, since the reference holds no rows for tokens that full attention was never fed.
  void follow(int32_t id, KvSession& kv) {
    if (writes_ || !same_) return;
    same_ = fed_ < int64_t(script_.tokens.size()) && script_.tokens[size_t(fed_)] == id;
    if (!same_) kv.set_check_every(0);
  }

  // `logits` followed the token.
  void note(int32_t id, std::span<const float> logits) {
    if (writes_) {
      script_.tokens.push_back(id);
      script_.logits.insert(script_.logits.end(), logits.begin(), logits.end());
    } else if (same_) {
      const auto vocab = int64_t(logits.size());
      const float* full = script_.logits.data() + fed_ * vocab;
      const double kl = kl_divergence(full, logits.data(), vocab);
      ++out_.compared;
      out_.kl_mean += kl;
      out_.kl_max = std::max(out_.kl_max, kl);
      out_.same_top += best({full, size_t(vocab)}) == best(logits);
      if (forced_) {
        const auto bucket = size_t(fed_ * kBuckets / int64_t(given_.size()));
        out_.kl_buckets[bucket] += kl;
        ++bucket_counts_[bucket];
      }
    }
    ++fed_;
  }

  void finish(const KvSession& kv) {
    if (forced_) {
      out_.nll /= double(std::max<size_t>(1, given_.size() - 1));
      for (size_t b = 0; b < bucket_counts_.size(); ++b) {
        if (bucket_counts_[b] > 0) out_.kl_buckets[b] /= double(bucket_counts_[b]);
      }
    } else {
      out_.text = std::string(cut_at_stop(text_, prompt_.sample.stop));
    }
    if (writes_) {
      out_.compared = int64_t(script_.tokens.size());
      out_.same_top = 1;
    } else if (out_.compared > 0) {
      out_.kl_mean /= double(out_.compared);
      out_.same_top /= double(out_.compared);
    }
    measure_decode(kv, out_);
  }

 private:
  const EvalPrompt& prompt_;
  const Tokenizer& tokenizer_;
  PlayScript& script_;
  const bool writes_, forced_;
  PlayedAnswer& out_;
  std::span<const int32_t> given_;  // question, or continuation
  std::vector<int64_t> bucket_counts_;
  std::string text_;
  bool same_ = true;  // the tokens fed so far are those of the script
  int64_t fed_ = 0;
};

PromptPlayer::PromptPlayer(Session& session, const Tokenizer& tokenizer, PlayOptions options,
                           const std::atomic<bool>* cancel)
    : session_(session), tokenizer_(tokenizer), options_(options), cancel_(cancel) {}

PromptPlayer::~PromptPlayer() = default;

// Something is always left to decode, so that an answer's first token is the recipe's own.
int64_t PromptPlayer::document_of(const EvalPrompt& prompt) const {
  const bool whole = options_.question_seen && prompt.continuation.empty();
  return whole ? int64_t(prompt.ids.size()) - 1 : prompt.document;
}

// By the session's present KV side, token by token.
Status PromptPlayer::answer(const EvalPrompt& prompt, bool writes, PlayedAnswer& out) {
  KvSession& kv = session_.kv();
  measure_prompt(kv, out);
  kv.reset_stats();
  Course course(prompt, document_of(prompt), tokenizer_, script_, writes, out);
  std::vector<double> seconds;
  while (const auto id = course.next(session_.logits())) {
    if (interrupted()) return fail(Code::kCancelled, "interrupted");
    course.follow(*id, kv);
    const int64_t checked = kv.stats().checked_steps;
    const auto begin = Clock::now();
    LONGKV_TRY(session_.decode(*id));
    if (kv.stats().checked_steps == checked) seconds.push_back(seconds_since(begin));
    course.note(*id, session_.logits());
  }
  course.finish(kv);
  if (!seconds.empty()) {
    std::nth_element(seconds.begin(), seconds.begin() + int64_t(seconds.size() / 2), seconds.end());
    out.seconds_per_token = seconds[seconds.size() / 2];
  }
  if (writes) script_.products_seconds = std::max(0.0, out.seconds_per_token - kv_seconds_per_step(kv.stats()));
  return {};
}

// Puts the side in the session's place; one that changes the prompt reads it first.
Status PromptPlayer::play_alone(const EvalPrompt& prompt, std::unique_ptr<KvSession>& side, PlayedAnswer& out) {
  session_.exchange_kv(side);
  Status played;
  if (!out.shared_prefill) {
    const auto begin = Clock::now();
    out.read_on_card = session_.reads_on_card();
    played = session_.prefill({prompt.ids.data(), size_t(document_of(prompt))}, {}, cancel_);
    out.prefill_seconds = seconds_since(begin);
  }
  const bool unreadable = played.code() == Code::kInvalidArgument;
  if (unreadable) {
    out.skipped = played.message();
  } else if (played.ok()) {
    played = answer(prompt, /*writes=*/false, out);
  }
  session_.exchange_kv(side);
  side.reset();
  return unreadable ? Status() : played;
}

// All sides that share the reading, a token each at a time. They are freed as they end; their answers are handed on
// together, for if a run is stopped in between, those of recipes that say little would be there and the others not.
Status PromptPlayer::play_in_step(const EvalPrompt& prompt, Sides& sides, const PlayedAnswer& like, const Sink& sink) {
  const auto vocab = session_.logits().size();
  struct Runner {
    int64_t recipe;
    PlayedAnswer out;
    std::unique_ptr<Course> course;
    std::vector<float> logits;
  };
  std::vector<std::unique_ptr<Runner>> runners, ended;
  for (size_t i = 0; i < sides.size(); ++i) {
    if (sides[i]->changes_prompt()) continue;
    auto r = std::make_unique<Runner>();
    r->recipe = int64_t(i);
    r->out.prefill_seconds = like.prefill_seconds;
    r->out.shared_prefill = true;
    r->out.read_on_card = like.read_on_card;
    r->logits.resize(vocab);
    r->course = std::make_unique<Course>(prompt, document_of(prompt), tokenizer_, script_, false, r->out);
    measure_prompt(*sides[i], r->out);
    sides[i]->reset_stats();
    runners.push_back(std::move(r));
  }
  if (!batch_) {
    batch_ = std::make_unique<BatchDecoder>(session_.model_pointer(), session_.context(), session_.options().products,
                                            session_.pool());
  }
  std::vector<KvSession*> kvs;
  std::vector<int32_t> ids;
  std::vector<float> logits;
  std::vector<Status> results;
  while (!runners.empty()) {
    if (interrupted()) return fail(Code::kCancelled, "interrupted");
    kvs.clear(), ids.clear();
    for (auto& r : runners) {
      auto& side = sides[size_t(r->recipe)];
      if (const auto id = r->course->next(r->logits)) {
        r->course->follow(*id, *side);
        kvs.push_back(side.get());
        ids.push_back(*id);
        continue;
      }
      r->course->finish(*side);
      r->out.seconds_per_token = script_.products_seconds + kv_seconds_per_step(side->stats());
      side.reset();
      ended.push_back(std::move(r));
    }
    std::erase(runners, nullptr);
    logits.resize(kvs.size() * vocab);
    results.assign(kvs.size(), Status());
    batch_->decode(kvs, ids, logits.data(), results);
    for (size_t i = 0; i < kvs.size(); ++i) {
      LONGKV_TRY(results[i]);
      std::copy_n(logits.begin() + int64_t(i * vocab), vocab, runners[i]->logits.begin());
      runners[i]->course->note(ids[i], runners[i]->logits);
    }
  }
  std::sort(ended.begin(), ended.end(), [](const auto& a, const auto& b) { return a->recipe < b->recipe; });
  for (const auto& r : ended) LONGKV_TRY(sink(r->recipe, r->out));
  return {};
}

Status PromptPlayer::play(const EvalPrompt& prompt, std::span<const Recipe> recipes, const PrefillProgress& progress,
                          const Sink& sink) {
  const std::span<const int32_t> read(prompt.ids.data(), size_t(document_of(prompt)));
  LONGKV_TRY(session_.truncate(0));
  Sides sides;
  for (const Recipe& recipe : recipes) {
    LONGKV_ASSIGN(auto side, session_.make_kv(recipe));
    sides.push_back(std::move(side));
  }
  bool shared = false;
  for (auto& side : sides) {
    if (side->changes_prompt()) continue;
    session_.kv().add_follower(side.get());
    shared = true;
  }
  const auto begin = Clock::now();
  PlayedAnswer written;
  written.read_on_card = session_.reads_on_card();
  const Status prefilled = session_.prefill(read, progress, cancel_);
  session_.kv().clear_followers();
  LONGKV_TRY(prefilled);
  written.prefill_seconds = seconds_since(begin);
  written.shared_prefill = shared;
  script_ = {};
  LONGKV_TRY(answer(prompt, /*writes=*/true, written));
  LONGKV_TRY(sink(-1, written));
  for (auto& side : sides) {
    side->set_reference(&session_.kv());
    side->set_check_every(options_.check_every);
  }
  if (options_.in_step && shared) LONGKV_TRY(play_in_step(prompt, sides, written, sink));
  for (size_t i = 0; i < sides.size(); ++i) {
    if (!sides[i]) continue;
    PlayedAnswer out;
    out.shared_prefill = !sides[i]->changes_prompt();
    out.prefill_seconds = written.prefill_seconds;
    out.read_on_card = written.read_on_card;
    LONGKV_TRY(play_alone(prompt, sides[i], out));
    LONGKV_TRY(sink(int64_t(i), out));
  }
  return session_.truncate(0);
}

Status PromptPlayer::replay(const EvalPrompt& prompt, PlayScript script, PlayedAnswer& out) {
  script_ = std::move(script);
  LONGKV_TRY(session_.truncate(0));
  const auto begin = Clock::now();
  out.read_on_card = session_.reads_on_card();
  LONGKV_TRY(session_.prefill({prompt.ids.data(), size_t(document_of(prompt))}, {}, cancel_));
  out.prefill_seconds = seconds_since(begin);
  LONGKV_TRY(answer(prompt, /*writes=*/false, out));
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
