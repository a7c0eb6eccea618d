#include "server/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/seconds.h"

namespace longkv::server {

namespace {

// Prompt work between two looks at the queue while nobody waits for a token.
constexpr double kIdlePromptSeconds = 0.05;
constexpr auto kPublishPause = std::chrono::milliseconds(20);
// Rest after which what the prefix cache holds in memory alone is written to its folder, one entry at a time.
constexpr auto kWritePause = std::chrono::milliseconds(200);
// Share of a new value in a running quantile: a tenth of values in a row doubles or halves it.
constexpr double kFollow = 0.07;
constexpr double kStepQuantile = 0.4, kTokenQuantile = 0.7;

// Moves `estimate` towards the given quantile of the values. Unlike a mean it does not follow the few values that other
// programs on the machine have stretched.
void follow(double& estimate, double value, double quantile) {
  if (estimate == 0) estimate = value;
  estimate *= value > estimate ? 1 + kFollow * quantile : 1 - kFollow * (1 - quantile);
}

}  // namespace

Result<std::unique_ptr<Scheduler>> Scheduler::create(const std::shared_ptr<const LoadedModel>& model,
                                                     const Tokenizer& tokenizer, const SchedulerOptions& options,
                                                     ThreadPool& pool) {
  std::unique_ptr<Scheduler> scheduler(new Scheduler(model, options, pool));
  for (int i = 0; i < options.slots; ++i) {
    LONGKV_ASSIGN(auto session, Session::create(model, options.session, pool));
    scheduler->slots_.push_back(std::make_unique<Slot>(i, std::move(session), tokenizer, options.prefixes.get()));
  }
  scheduler->last_token_.resize(size_t(options.slots));
  scheduler->step_seconds_.resize(size_t(options.slots));
  scheduler->publish();
  scheduler->thread_ = std::thread([s = scheduler.get()] { s->loop(); });
  return scheduler;
}

Scheduler::Scheduler(std::shared_ptr<const LoadedModel> model, const SchedulerOptions& options, ThreadPool& pool)
    : options_(options), batch_(std::move(model), options.session.context, options.session.products, pool) {}

Scheduler::~Scheduler() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  const Status ends = fail(Code::kCancelled, "the server is shutting down");
  for (const auto& slot : slots_) {
    if (slot->state() != SlotState::kIdle) slot->abandon(ends);
  }
  for (const auto& job : waiting_) job->events->push(ends);
}

std::shared_ptr<EventQueue> Scheduler::submit(GenerateRequest request) {
  auto job = std::make_shared<Job>();
  job->request = std::move(request);
  auto events = job->events;
  {
    std::lock_guard lock(mutex_);
    // Idle slots take from the queue at once, so their number may wait on top of the limit.
    const size_t room = options_.queue + size_t(options_.slots - busy_);
    if (stop_ || waiting_.size() >= room) {
      ++refused_;
      return nullptr;
    }
    waiting_.push_back(std::move(job));
  }
  wake_.notify_all();
  return events;
}

Status Scheduler::with_idle_slot(int slot, const std::function<Status(Slot&)>& work, bool* busy) {
  if (slot < 0 || slot >= options_.slots)
    return fail(Code::kInvalidArgument, "there is no slot {}; slots are 0 to {}", slot, options_.slots - 1);
  SlotWork item{.slot = slot, .work = &work, .result = {}};
  std::unique_lock lock(mutex_);
  works_.push_back(&item);
  wake_.notify_all();
  work_done_.wait(lock, [&] { return item.done || (stop_ && !item.begun); });
  if (!item.done) {
    std::erase(works_, &item);
    return fail(Code::kCancelled, "the server is shutting down");
  }
  if (busy != nullptr) *busy = item.busy;
  return item.result;
}

Counters Scheduler::counters() const {
  std::lock_guard lock(mutex_);
  Counters c = counters_;
  c.waiting = int(waiting_.size());
  c.refused = refused_;
  return c;
}

std::vector<SlotInfo> Scheduler::slots() const {
  std::lock_guard lock(mutex_);
  return infos_;
}

bool Scheduler::busy(SlotState state) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const auto& s) { return s->state() == state; });
}

void Scheduler::loop() {
  for (;;) {
    publish();
    {
      std::unique_lock lock(mutex_);
      const auto wanted = [&] {
        return stop_ || !waiting_.empty() || !works_.empty() || busy(SlotState::kReading) ||
               busy(SlotState::kAnswering);
      };
      if (!unwritten_) {
        wake_.wait(lock, wanted);
      } else if (!wake_.wait_for(lock, kWritePause, wanted)) {
        lock.unlock();
        write_prefix();
        continue;
      }
      if (stop_) {
        work_done_.notify_all();
        return;
      }
    }
    do_works();
    drop_gone();
    assign();
    read_prompts();
    answer();
  }
}

void Scheduler::write_prefix() {
  const auto wrote = options_.prefixes->write_one();
  unwritten_ = wrote.ok() && *wrote;
  if (!wrote.ok()) log_info("prefix cache: {}", wrote.status().message());
}

void Scheduler::do_works() {
  std::unique_lock lock(mutex_);
  while (!works_.empty()) {
    SlotWork& item = *works_.front();
    works_.pop_front();
    item.begun = true;
    Slot& slot = *slots_[size_t(item.slot)];
    item.busy = slot.state() != SlotState::kIdle;
    if (item.busy) {
      item.result = fail(Code::kInvalidArgument, "slot {} serves a request; try again when it is idle", item.slot);
    } else {
      // The caller waits for `done`, so its function lives on while nobody holds the lock.
      lock.unlock();
      const Status result = (*item.work)(slot);
      // Whoever asked must find the new state when it asks again.
      published_ = {};
      publish();
      lock.lock();
      item.result = result;
    }
    item.done = true;
    work_done_.notify_all();
  }
}

// Requests whose client left or whose time is over, wherever they are.
void Scheduler::drop_gone() {
  const auto reason = [](const Job& job) -> Status {
    if (job.events->cancelled()) return fail(Code::kCancelled, "the client left");
    if (job.request.deadline && Clock::now() > *job.request.deadline)
      return fail(Code::kCancelled, "the time limit of the request is over");
    return {};
  };
  for (const auto& slot : slots_) {
    if (slot->state() == SlotState::kIdle) continue;
    if (const Status s = reason(slot->job()); !s.ok()) abandon(*slot, s);
  }
  std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [&](const std::shared_ptr<Job>& job) {
    const Status s = reason(*job);
    if (s.ok()) return false;
    ++(job->events->cancelled() ? now_.cancelled : now_.timed_out);
    job->events->push(s);
    return true;
  });
}

// The idle slot that saves most reading; of equal ones the one whose loss costs least: few tokens, long unused.
Slot* Scheduler::best_slot(const GenerateRequest& request) {
  Slot* best = nullptr;
  std::pair<int64_t, double> best_score;
  const auto now = Clock::now();
  for (const auto& slot : slots_) {
    if (slot->state() != SlotState::kIdle || (request.slot >= 0 && slot->id() != request.slot)) continue;
    const double minutes = ms_between(slot->last_used(), now) / 60000;
    const std::pair<int64_t, double> score = {slot->reusable(request), -double(slot->held().size()) / (1 + minutes)};
    if (best == nullptr || score > best_score) best = slot.get(), best_score = score;
  }
  return best;
}

void Scheduler::assign() {
  for (;;) {
    std::shared_ptr<Job> job;
    Slot* slot = nullptr;
    {
      std::lock_guard lock(mutex_);
      const auto at = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& waiting) {
        slot = best_slot(waiting->request);
        return slot != nullptr;
      });
      if (at == waiting_.end()) return;
      job = *at;
      waiting_.erase(at);
      ++busy_;
    }
    const Status began = slot->begin(std::move(job));
    now_.prompt_tokens += slot->timings().prompt_tokens;
    now_.cached_tokens += slot->timings().cached_tokens;
    if (slot->timings().from_cache) now_.stored_tokens += slot->timings().cached_tokens;
    if (!began.ok()) abandon(*slot, began);
  }
}

// By turns the prompt that came first and the one with least to read: short questions do not wait for a whole book,
// and books are not held up for ever by questions.
Slot* Scheduler::next_prompt() {
  Slot* best = nullptr;
  const bool oldest = turn_++ % 2 == 0;
  for (const auto& slot : slots_) {
    if (slot->state() != SlotState::kReading) continue;
    const bool better = best == nullptr || (oldest ? slot->job().arrived < best->job().arrived
                                                   : slot->prompt_left() < best->prompt_left());
    if (better) best = slot.get();
  }
  return best;
}

// Seconds of a decode step of as many slots as the last one had, with nothing else to do. Steps beside prompts stand
// for it where there were no others; before the first of all there is nothing to measure by.
double Scheduler::ordinary_step() const {
  if (last_batch_ == 0) return 0;
  const StepSeconds& steps = step_seconds_[std::min(last_batch_, step_seconds_.size()) - 1];
  return steps.alone > 0 ? steps.alone : steps.beside;
}

void Scheduler::read_prompts() {
  const bool answering = busy(SlotState::kAnswering);
  const double budget = !answering ? kIdlePromptSeconds : options_.prompt_share * ordinary_step();
  const auto begin = Clock::now();
  for (auto piece_begin = begin;; piece_begin = Clock::now()) {
    Slot* slot = next_prompt();
    if (slot == nullptr) return;
    Session& session = slot->session();
    const double left = budget - std::chrono::duration<double>(piece_begin - begin).count();
    int64_t tokens = session.piece_tokens();
    // A new chunk is made so short that one piece of it fits the budget. What a token takes is known from another
    // prompt when one begins, which may have been read at another depth and with nothing beside it: half of that first.
    const bool may_cut = answering && tokens == 0 && token_seconds_ > 0;
    const double room = session.prompt_progress() == 0 ? budget / 2 : budget;
    const int64_t at_most = may_cut ? std::max<int64_t>(1, int64_t(room / token_seconds_)) : INT64_MAX;
    // The first piece is read in any case, or prompts would starve.
    const double wanted = tokens > 0 ? token_seconds_ * double(tokens) : budget / 2;
    if (answering && piece_begin != begin && left < wanted) return;
    const Status s = slot->read(at_most);
    const double seconds = seconds_since(piece_begin);
    now_.prompt_seconds += seconds;
    if (!s.ok()) {
      abandon(*slot, s);
    } else {
      tokens = std::max(tokens, session.piece_tokens());
      if (tokens > 0) follow(token_seconds_, seconds / double(tokens), kTokenQuantile);
      read_some_ = true;
      if (slot->state() == SlotState::kAnswering) return;  // its first token comes before more reading
    }
    if (seconds_since(begin) >= budget) return;
  }
}

void Scheduler::answer() {
  struct Turn {
    Slot* slot = nullptr;
    std::shared_ptr<const Job> job;
    int64_t before = 0;  // tokens answered
    Result<std::optional<int32_t>> chosen = std::optional<int32_t>();
    Clock::time_point at{};
  };
  std::vector<Turn> turns;
  std::vector<std::pair<Slot*, int32_t>> batch;
  const auto begin = Clock::now();
  for (const auto& slot : slots_) {
    if (slot->state() != SlotState::kAnswering) continue;
    turns.push_back({.slot = slot.get(), .job = slot->shared_job(), .before = slot->timings().answer_tokens});
  }
  if (turns.empty()) return;
  // Sampling goes through the whole vocabulary, for every slot by itself.
  turns.front().slot->session().pool().run(int64_t(turns.size()), [&](int64_t i, int) {
    Turn& turn = turns[size_t(i)];
    turn.chosen = turn.slot->choose();
    turn.at = Clock::now();
  });
  for (Turn& turn : turns) {
    Slot& slot = *turn.slot;
    unwritten_ |= slot.store_prefix();
    if (slot.timings().answer_tokens > turn.before) {
      Clock::time_point& last = last_token_[size_t(slot.id())];
      ++now_.answer_tokens;
      turn.before == 0 ? now_.first_token.add(ms_between(turn.job->arrived, turn.at) / 1000)
                       : now_.between_tokens.add(ms_between(last, turn.at) / 1000);
      last = turn.at;
    }
    if (!turn.chosen.ok()) {
      abandon(slot, turn.chosen.status());
    } else if (!*turn.chosen) {
      count_end(slot, *turn.job, {});
    } else {
      batch.emplace_back(&slot, **turn.chosen);
    }
  }
  if (batch.empty()) return;
  const auto step_begin = Clock::now();
  std::vector<Session*> sessions;
  std::vector<int32_t> ids;
  for (const auto& [slot, id] : batch) {
    sessions.push_back(&slot->session());
    ids.push_back(id);
  }
  std::vector<Status> results(batch.size());
  batch_.decode(sessions, ids, results);
  for (size_t i = 0; i < batch.size(); ++i) {
    if (!results[i].ok()) abandon(*batch[i].first, results[i], /*broken=*/true);
  }
  // A step beside a prompt finds the caches full of other things; what counts is one without.
  StepSeconds& steps = step_seconds_[std::min(batch.size(), step_seconds_.size()) - 1];
  follow(std::exchange(read_some_, false) ? steps.beside : steps.alone, seconds_since(step_begin), kStepQuantile);
  last_batch_ = batch.size();
  now_.answer_seconds += seconds_since(begin);
  ++now_.steps;
  now_.slot_steps += int64_t(batch.size());
}

void Scheduler::abandon(Slot& slot, const Status& reason, bool broken) {
  const std::shared_ptr<const Job> job = slot.shared_job();
  slot.abandon(reason, broken);
  count_end(slot, *job, reason);
}

void Scheduler::count_end(const Slot& slot, const Job& job, const Status& status) {
  const Timings& t = slot.timings();
  const KvStats& stats = slot.session().kv().stats();
  now_.kv_bytes_read += stats.kv_bytes;
  now_.index_bytes_read += stats.index_bytes;
  now_.select_seconds += stats.seconds_select;
  now_.attend_seconds += stats.seconds_attend;
  if (t.captured_mass >= 0) {
    now_.captured_mass_sum += t.captured_mass;
    ++now_.captured_mass_count;
  }
  now_.longest = std::max(now_.longest, int64_t(slot.held().size()));
  {
    std::lock_guard lock(mutex_);
    --busy_;
  }
  const double seconds = ms_between(job.arrived, Clock::now()) / 1000;
  now_.request.add(seconds);
  const char* how = "failed";
  if (status.ok()) {
    const bool full = slot.last_finish() == Finish::kLength;
    how = full ? "length" : "stop";
    ++(full ? now_.finished_length : now_.finished_stop);
  } else if (status.code() != Code::kCancelled) {
    ++now_.failed;
  } else if (job.events->cancelled()) {
    how = "cancelled";
    ++now_.cancelled;
  } else {
    how = "timeout";
    ++now_.timed_out;
  }
  // Never what was said: sizes and times only.
  log_info(
      "{}: slot {}, {} prompt tokens ({} held), {} answered, {:.0f} ms waiting, {:.0f} ms reading, {:.0f} ms "
      "answering, {}",
      job.request.id, slot.id(), t.prompt_tokens, t.cached_tokens, t.answer_tokens, t.queue_ms, t.prompt_ms,
      t.answer_ms, how);
}

// Copies what other threads may ask for; not for every token.
void Scheduler::publish() {
  const auto time = Clock::now();
  const bool idle = !busy(SlotState::kReading) && !busy(SlotState::kAnswering);
  if (!idle && time - published_ < kPublishPause) return;
  published_ = time;
  now_.slots = options_.slots;
  now_.busy = 0;
  if (options_.prefixes) now_.prefixes = options_.prefixes->stats();
  now_.tokens_held = now_.token_capacity = now_.kv_bytes_held = 0;
  std::vector<SlotInfo> infos;
  for (const auto& slot : slots_) {
    SlotInfo info;
    info.id = slot->id();
    info.state = slot->state();
    info.recipe = slot->recipe();
    info.context = slot->session().context();
    info.held = slot->session().tokens();
    info.kv_bytes = slot->session().kv().cache().bytes_used() + slot->session().kv().index_bytes_held();
    const KvStats& stats = slot->session().kv().stats();
    if (stats.steps > 0) info.read_per_token = double(stats.kv_bytes + stats.index_bytes) / double(stats.steps);
    info.captured_mass = captured_mass(stats);
    if (info.state != SlotState::kIdle) {
      const GenerateRequest& request = slot->job().request;
      info.request = request.id;
      info.prompt_tokens = slot->timings().prompt_tokens;
      info.cached = slot->timings().cached_tokens;
      info.prompt_done = slot->prompt_done();
      info.answered = slot->timings().answer_tokens;
      info.max_tokens = request.max_tokens;
      info.sampling = request.sampling;
      ++now_.busy;
    }
    now_.tokens_held += info.held;
    now_.token_capacity += info.context;
    now_.kv_bytes_held += info.kv_bytes;
    infos.push_back(std::move(info));
  }
  std::lock_guard lock(mutex_);
  counters_ = now_;
  infos_ = std::move(infos);
}

}  // namespace longkv::server
