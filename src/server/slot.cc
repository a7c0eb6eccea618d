#include "server/slot.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace longkv::server {

namespace {

constexpr int64_t kWorthStoring = 256;  // tokens of a prompt that the prefix cache does not know
constexpr int64_t kWorthTaking = 64;    // ... that it knows and the slot does not
constexpr auto kProgressPause = std::chrono::milliseconds(50);

int64_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

bool penalises(const SamplingParams& p) {
  return p.repeat_last_n != 0 &&
         (p.repeat_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f);
}

}  // namespace

double captured_mass(const KvStats& stats) {
  if (stats.checked_steps == 0) return -1;
  double mass = 0;
  for (const double m : stats.captured_mass) mass += m;
  return mass / double(stats.checked_steps) / double(stats.captured_mass.size());
}

Slot::Slot(int id, std::unique_ptr<Session> session, const Tokenizer& tokenizer, PrefixCache* prefixes)
    : id_(id),
      session_(std::move(session)),
      tokenizer_(tokenizer),
      prefixes_(prefixes),
      recipe_(session_->kv().recipe().canonical()) {}

int64_t Slot::reusable(const GenerateRequest& request) const {
  if (request.reuse == Reuse::kNone || request.prompt_logprobs || request.salt != salt_) return 0;
  if (request.recipe && !(*request.recipe == session_->kv().recipe())) return 0;
  // The last token is read in any case: its logits are what the answer starts from.
  const auto prompt = int64_t(request.ids.size());
  const int64_t most = std::min(common_prefix(held(), request.ids), prompt - 1);
  if (request.reuse == Reuse::kAny) {
    return session_->keeps_prefixes() || most == int64_t(held().size()) ? most : 0;
  }
  return session_->keeps_prefixes() ? session_->resume_point(std::min(most, session_->origin().exact), prompt) : 0;
}

Status Slot::begin(std::shared_ptr<Job> job) {
  job_ = std::move(job);
  const GenerateRequest& request = job_->request;
  began_ = progress_sent_ = last_used_ = Clock::now();
  state_ = SlotState::kReading;
  int64_t keep = reusable(request);
  if (request.recipe) LONGKV_TRY(use_recipe(*request.recipe));
  take_prefix(keep);
  if (!session_->truncate(keep).ok()) {
    // Sliding windows have let go of rows that the shorter sequence needs.
    keep = 0;
    LONGKV_TRY(session_->truncate(0));
  }
  salt_ = request.salt;
  timings_ = Timings{};
  timings_.prompt_tokens = int64_t(request.ids.size());
  timings_.cached_tokens = keep;
  timings_.from_cache = keep > 0 && from_cache_;
  timings_.queue_ms = ms_between(job_->arrived, began_);
  timings_.slot = id_;
  timings_.recipe = recipe_;
  sampler_.emplace(request.sampling);
  if (penalises(request.sampling)) {
    const int64_t n = int64_t(request.ids.size()), last = request.sampling.repeat_last_n;
    for (int64_t i = last < 0 ? 0 : std::max<int64_t>(0, n - last); i < n; ++i)
      sampler_->accept(request.ids[size_t(i)]);
  }
  text_.emplace(request.stops);
  grammar_.reset();
  if (request.schema) grammar_.emplace(*request.schema);
  session_->set_check_every(request.check_every);
  session_->kv().reset_stats();
  report_progress(true);
  if (keep == timings_.prompt_tokens) return begin_answer(), Status();
  if (!request.prompt_logprobs) return session_->start_prompt(std::span(request.ids).subspan(size_t(keep)));
  prompt_reports_ = {};
  prompt_reports_.reports.push_back({{request.ids[0], std::string(tokenizer_.piece(request.ids[0])), NAN}, {}});
  return session_->start_prompt(request.ids, [this, &request](int64_t first, int64_t n, const float* logits) {
    const int64_t vocab = session_->model().config().vocab;
    for (int64_t t = first; t < first + n && t + 1 < int64_t(request.ids.size()); ++t) {
      prompt_reports_.reports.push_back(report_token({logits + (t - first) * vocab, size_t(vocab)},
                                                     request.ids[size_t(t + 1)], request.logprobs, tokenizer_));
    }
  });
}

Status Slot::read(int64_t at_most) {
  LONGKV_ASSIGN(const bool done, session_->read_piece(&job_->events->cancelled(), at_most));
  if (!done) {
    report_progress(false);
    return {};
  }
  if (job_->request.prompt_logprobs) job_->events->push(std::exchange(prompt_reports_, {}));
  worth_storing_ = prefixes_ != nullptr && job_->request.reuse != Reuse::kNone &&
                   timings_.prompt_tokens - prefixes_->usable(*session_, session_->ids(), salt_) >= kWorthStoring;
  begin_answer();
  return {};
}

void Slot::begin_answer() {
  answering_since_ = last_used_ = Clock::now();
  timings_.prompt_ms = ms_between(began_, answering_since_);
  state_ = SlotState::kAnswering;
  report_progress(true);
}

// Where the prefix cache knows more of the prompt than the slot, puts it into the session. What goes wrong there costs
// reading, not the request.
void Slot::take_prefix(int64_t& keep) {
  const GenerateRequest& request = job_->request;
  from_cache_ = false;
  if (prefixes_ == nullptr || request.reuse == Reuse::kNone || request.prompt_logprobs) return;
  if (prefixes_->usable(*session_, request.ids, request.salt) < keep + kWorthTaking) return;
  const auto found = prefixes_->lookup(*session_, request.ids, request.salt);
  if (!found.ok()) return log_info("prefix cache: {}", found.status().message());
  keep = *found;
  from_cache_ = true;
}

void Slot::store_prefix(const Pause& pause) {
  const Status stored = prefixes_->insert(*session_, salt_, pause);
  if (!stored.ok()) log_info("prefix cache: {}", stored.message());
}

void Slot::report_progress(bool force) {
  const auto now = Clock::now();
  if (!force && now - progress_sent_ < kProgressPause) return;
  progress_sent_ = now;
  job_->events->push(
      PromptProgress{timings_.prompt_tokens, timings_.cached_tokens, prompt_done(), ms_between(began_, now)});
}

Result<std::optional<int32_t>> Slot::choose() {
  const GenerateRequest& request = job_->request;
  const auto ended = [&](Finish how) {
    finish(how);
    return std::optional<int32_t>();
  };
  if (held_token_) return std::exchange(held_token_, std::nullopt);
  if (request.max_tokens == 0) return ended(Finish::kLength);
  const auto chosen = choose_token(*sampler_, session_->logits(), grammar_ ? &*grammar_ : nullptr, tokenizer_);
  if (!chosen) {
    return fail(Code::kUnsupported,
                "no token of this model's vocabulary continues the JSON answer under the given schema");
  }
  const int32_t id = *chosen;
  if (tokenizer_.is_eog(id) && !request.ignore_eos) return ended(Finish::kStop);
  sampler_->accept(id);
  ++timings_.answer_tokens;
  const bool silent = tokenizer_.is_control(id) && !request.show_special;
  const std::string_view bytes = silent ? std::string_view() : tokenizer_.piece(id);
  std::optional<TokenReport> report;
  if (request.logprobs >= 0) report = report_token(session_->logits(), id, request.logprobs, tokenizer_);
  if (grammar_) grammar_->push(bytes);
  send(text_->push(id, bytes, std::move(report)));
  last_used_ = Clock::now();
  if (text_->stopped() || (grammar_ && grammar_->closed())) return ended(Finish::kStop);
  if (timings_.answer_tokens == request.max_tokens || session_->tokens() >= session_->context())
    return ended(Finish::kLength);
  return std::optional<int32_t>(id);
}

void Slot::send(TextPiece piece) {
  if (!piece.text.empty() || !piece.ids.empty()) job_->events->push(std::move(piece));
}

void Slot::take_stats() {
  const KvStats& stats = session_->kv().stats();
  if (stats.steps > 0) {
    timings_.kv_bytes_per_token = double(stats.kv_bytes) / double(stats.steps);
    timings_.index_bytes_per_token = double(stats.index_bytes) / double(stats.steps);
  }
  timings_.captured_mass = captured_mass(stats);
  timings_.kv_bytes_held = session_->kv().cache().bytes_used() + session_->kv().index_bytes_held();
}

void Slot::finish(Finish how) {
  send(text_->flush());
  // A stop string may have been completed by what was held back.
  if (text_->stopped()) how = Finish::kStop;
  timings_.answer_ms = ms_between(answering_since_, Clock::now());
  take_stats();
  last_finish_ = how;
  job_->events->push(Finished{how, text_->stop(), timings_});
  rest();
}

void Slot::abandon(const Status& reason, bool broken) {
  session_->drop_prompt();
  worth_storing_ = false;
  if (broken) erase();
  timings_.answer_ms = state_ == SlotState::kAnswering ? ms_between(answering_since_, Clock::now()) : 0;
  take_stats();
  job_->events->push(reason);
  rest();
}

void Slot::rest() {
  state_ = SlotState::kIdle;
  last_used_ = Clock::now();
  job_.reset();
  sampler_.reset();
  text_.reset();
  grammar_.reset();
  held_token_.reset();
}

Status Slot::use_recipe(const Recipe& recipe) {
  if (recipe == session_->kv().recipe()) return {};
  LONGKV_ASSIGN(auto kv, session_->make_kv(recipe));
  session_->adopt(std::move(kv), {}, {}, {});
  recipe_ = recipe.canonical();
  return {};
}

Result<KvRestored> Slot::restore(const Recipe& recipe, const std::string& path, const std::string& salt,
                                 const Pause& pause) {
  std::unique_ptr<KvSession> kv;
  const bool other = !(recipe == session_->kv().recipe());
  if (other) {
    LONGKV_ASSIGN(kv, session_->make_kv(recipe));
    session_->exchange_kv(kv);
  }
  KvRestoreOptions options;
  options.pause = pause;
  auto restored = restore_session(*session_, path, options);
  if (restored.ok()) {
    recipe_ = recipe.canonical();
    salt_ = salt;
  } else if (other) {
    session_->exchange_kv(kv);
  }
  return restored;
}

void Slot::erase() {
  (void)session_->truncate(0);  // an empty sequence is always possible
  salt_.clear();
}

}  // namespace longkv::server
