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
  scheduler->publish();
  scheduler->thread_ = std::thread([s = scheduler.get()] { s->loop(); });
  return scheduler;
}

Scheduler::Scheduler(std::shared_ptr<const LoadedModel> model, const SchedulerOptions& options, ThreadPool& pool)
    : options_(options),
      batch_(std::move(model), options.session.context, options.session.products, pool),
      pace_(options.prompt_share, size_t(options.slots)) {}

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
        return stop_ || !waiting_.empty() || !works_.empty() || action_ || !to_store_.empty() ||
               busy(SlotState::kReading) || busy(SlotState::kAnswering);
      };
      if (!unwritten_) {
        wake_.wait(lock, wanted);
      } else if (!wake_.wait_for(lock, kWritePause, wanted)) {
        lock.unlock();
        write_prefix();
        continue;
      }
      if (stop_) {
        lock.unlock();
        if (action_) end_action();
        for (begin_storing(); storing_; begin_storing()) end_storing();
        work_done_.notify_all();
        return;
      }
    }
    begin_storing();
    begin_action();
    drop_gone();
    const bool storing = !to_store_.empty();
    if (!storing) assign();
    if (late_turn()) {
      read_some_ = true;  // what the step finds in the caches is not what it finds alone
    } else if (!go_on_aside() && !storing) {
      read_prompts();
    }
    answer();
  }
}

void Scheduler::write_prefix() {
  const auto wrote = options_.prefixes->write_one();
  unwritten_ = wrote.ok() && *wrote;
  if (!wrote.ok()) log_info("prefix cache: {}", wrote.status().message());
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
    if (slot->state() == SlotState::kIdle || aside(slot.get())) continue;
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
    if (aside(slot.get())) continue;
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

// Whether the tokens of running answers have been waited for so long that nothing else is done before the next ones.
bool Scheduler::late_turn() {
  const Slot* next = nullptr;
  bool answering = false;
  for (const auto& slot : slots_) {
    if (slot->state() == SlotState::kReading) next = slot.get();
    answering |=
        slot->state() == SlotState::kAnswering && slot->timings().answer_tokens > 0 && !waits_for_copy(slot.get());
  }
  if (!answering || (next == nullptr && !storing_ && !action_)) return false;
  const int64_t tokens = next == nullptr ? 0 : std::max(next->session().piece_tokens(), Session::kPieceTokens);
  return pace_.late(seconds_since(told_), pace_.token_seconds() * double(tokens));
}

// That other work may take between two decode steps.
double Scheduler::other_work_seconds(bool answering) const { return answering ? pace_.budget() : kIdlePromptSeconds; }

void Scheduler::read_prompts() {
  const bool answering = busy(SlotState::kAnswering);
  const double budget = other_work_seconds(answering);
  const auto begin = Clock::now();
  for (auto piece_begin = begin;; piece_begin = Clock::now()) {
    Slot* slot = next_prompt();
    if (slot == nullptr) return;
    Session& session = slot->session();
    const double left = budget - std::chrono::duration<double>(piece_begin - begin).count();
    int64_t tokens = session.piece_tokens();
    // A new chunk is made so short that one piece of it fits the budget. What a token takes is known from another
    // prompt when one begins, which may have been read at another depth and with nothing beside it: half of that first.
    const double each = pace_.token_seconds();
    const bool may_cut = answering && tokens == 0 && each > 0;
    const double room = session.prompt_progress() == 0 ? budget / 2 : budget;
    const int64_t at_most = may_cut ? std::max<int64_t>(1, int64_t(room / each)) : INT64_MAX;
    // The first piece is read in any case, or prompts would starve.
    const double wanted = tokens > 0 ? each * double(tokens) : budget / 2;
    if (answering && piece_begin != begin && left < wanted) return;
    const Status s = slot->read(at_most);
    const double seconds = seconds_since(piece_begin);
    now_.prompt_seconds += seconds;
    if (!s.ok()) {
      abandon(*slot, s);
    } else {
      tokens = std::max(tokens, session.piece_tokens());
      pace_.piece(tokens, seconds);
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
    if (slot->state() != SlotState::kAnswering || waits_for_copy(slot.get())) continue;
    turns.push_back({.slot = slot.get(), .job = slot->shared_job(), .before = slot->timings().answer_tokens});
  }
  if (turns.empty()) return;
  // Sampling goes through the whole vocabulary, for every slot by itself.
  told_ = begin;
  turns.front().slot->session().pool().run(int64_t(turns.size()), [&](int64_t i, int) {
    Turn& turn = turns[size_t(i)];
    turn.chosen = turn.slot->choose();
    turn.at = Clock::now();
  });
  for (Turn& turn : turns) {
    Slot& slot = *turn.slot;
    if (slot.timings().answer_tokens > turn.before) {
      Clock::time_point& last = last_token_[size_t(slot.id())];
      ++now_.answer_tokens;
      turn.before == 0 ? now_.first_token.add(ms_between(turn.job->arrived, turn.at) / 1000)
                       : now_.between_tokens.add(ms_between(last, turn.at) / 1000);
      last = turn.at;
    }
    const bool store = slot.take_worth_storing();
    if (store) to_store_.push_back(&slot);
    if (!turn.chosen.ok()) {
      abandon(slot, turn.chosen.status());
    } else if (!*turn.chosen) {
      count_end(slot, *turn.job, {});
    } else if (store) {
      slot.hold(**turn.chosen);
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
  pace_.step(batch.size(), seconds_since(step_begin), std::exchange(read_some_, false));
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

SlotInfo Scheduler::describe(const Slot& slot) {
  SlotInfo info;
  info.id = slot.id();
  info.state = slot.state();
  info.recipe = slot.recipe();
  info.context = slot.session().context();
  info.held = slot.session().tokens();
  info.kv_bytes = slot.session().kv().cache().bytes_used() + slot.session().kv().index_bytes_held();
  const KvStats& stats = slot.session().kv().stats();
  if (stats.steps > 0) info.read_per_token = double(stats.kv_bytes + stats.index_bytes) / double(stats.steps);
  info.captured_mass = captured_mass(stats);
  if (info.state == SlotState::kIdle) return info;
  const GenerateRequest& request = slot.job().request;
  info.request = request.id;
  info.prompt_tokens = slot.timings().prompt_tokens;
  info.cached = slot.timings().cached_tokens;
  info.prompt_done = slot.prompt_done();
  info.answered = slot.timings().answer_tokens;
  info.max_tokens = request.max_tokens;
  info.sampling = request.sampling;
  return info;
}

// Copies what other threads may ask for; not for every token.
void Scheduler::publish() {
  const auto time = Clock::now();
  const bool idle = !busy(SlotState::kReading) && !busy(SlotState::kAnswering);
  if (!idle && time - published_ < kPublishPause) return;
  published_ = time;
  now_.slots = options_.slots;
  now_.busy = 0;
  if (options_.prefixes && to_store_.empty()) now_.prefixes = options_.prefixes->stats();
  now_.tokens_held = now_.token_capacity = now_.kv_bytes_held = 0;
  std::vector<SlotInfo> infos;
  for (const auto& slot : slots_) {
    // A slot at work aside stays what it was said to be last.
    const SlotInfo& info = infos.emplace_back(aside(slot.get()) ? infos_[size_t(slot->id())] : describe(*slot));
    now_.busy += info.state != SlotState::kIdle ? 1 : 0;
    now_.tokens_held += info.held;
    now_.token_capacity += info.context;
    now_.kv_bytes_held += info.kv_bytes;
  }
  std::lock_guard lock(mutex_);
  counters_ = now_;
  infos_ = std::move(infos);
}

}  // namespace longkv::server
