// What takes long beside prompts and answers: copies into the prefix cache, slots that are saved and restored.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "server/scheduler.h"

namespace longkv::server {

Status Scheduler::with_idle_slot(int slot, const SlotAction& action, bool* busy) {
  if (slot < 0 || slot >= options_.slots)
    return fail(Code::kInvalidArgument, "there is no slot {}; slots are 0 to {}", slot, options_.slots - 1);
  SlotWork item{.slot = slot, .action = &action, .result = {}};
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

bool Scheduler::waits_for_copy(const Slot* slot) const {
  return std::find(to_store_.begin(), to_store_.end(), slot) != to_store_.end();
}

bool Scheduler::aside(const Slot* slot) const {
  return (storing_ && storing_->slot == slot) || (action_ && action_->slot == slot);
}

// The next of the prompts that are to be copied into the prefix cache.
void Scheduler::begin_storing() {
  if (storing_ || to_store_.empty()) return;
  Slot* slot = to_store_.front();
  storing_ = Aside{slot, std::make_unique<Portions>([slot](const Pause& pause) { slot->store_prefix(pause); })};
}

// Waits for what is left of it.
void Scheduler::end_storing() {
  storing_.reset();
  to_store_.pop_front();
  unwritten_ = true;
}

// Where nothing else goes on, an action has the whole machine and runs here.
void Scheduler::begin_action() {
  // A slot that is being copied may be idle already.
  if (action_ || !to_store_.empty()) return;
  std::unique_lock lock(mutex_);
  while (!works_.empty()) {
    SlotWork& item = *works_.front();
    works_.pop_front();
    item.begun = true;
    Slot& slot = *slots_[size_t(item.slot)];
    if (slot.state() != SlotState::kIdle) {
      item.busy = item.done = true;
      item.result = fail(Code::kInvalidArgument, "slot {} serves a request; try again when it is idle", item.slot);
      work_done_.notify_all();
      continue;
    }
    lock.unlock();
    // The caller waits for `done`, so the item and its function live on.
    if (busy(SlotState::kReading) || busy(SlotState::kAnswering)) {
      acting_ = &item;
      action_ = Aside{&slot, std::make_unique<Portions>([work = &item, at = &slot](const Pause& pause) {
                        work->result = (*work->action)(*at, pause);
                      })};
      return;
    }
    item.result = (*item.action)(slot, {});
    tell_done(item);
    lock.lock();
  }
}

// Waits for what is left of it.
void Scheduler::end_action() {
  action_.reset();
  tell_done(*std::exchange(acting_, nullptr));
}

void Scheduler::tell_done(SlotWork& item) {
  // Whoever asked must find the new state when it asks again.
  published_ = {};
  publish();
  const std::lock_guard lock(mutex_);
  item.done = true;
  work_done_.notify_all();
}

// A portion of what is done aside: copies first, for their answers wait; actions and prompts by turns. Whether there
// was any.
bool Scheduler::go_on_aside() {
  const bool storing = storing_.has_value();
  if (!storing && (!action_ || (!std::exchange(act_next_, !act_next_) && busy(SlotState::kReading)))) return false;
  const bool answering = std::any_of(slots_.begin(), slots_.end(), [&](const auto& slot) {
    return slot->state() == SlotState::kAnswering && !waits_for_copy(slot.get());
  });
  if ((storing ? storing_ : action_)->run->run_for(other_work_seconds(answering)))
    storing ? end_storing() : end_action();
  return true;
}

}  // namespace longkv::server
