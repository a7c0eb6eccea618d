#include "server/events.h"

#include <utility>

namespace longkv::server {

void EventQueue::push(Event event) {
  {
    std::lock_guard lock(mutex_);
    // Of progress only the last word counts.
    if (std::holds_alternative<PromptProgress>(event) && !events_.empty() &&
        std::holds_alternative<PromptProgress>(events_.back())) {
      events_.back() = std::move(event);
    } else {
      events_.push_back(std::move(event));
    }
  }
  ready_.notify_one();
}

std::vector<Event> EventQueue::take(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  ready_.wait_for(lock, timeout, [&] { return !events_.empty(); });
  return std::exchange(events_, {});
}

}  // namespace longkv::server
