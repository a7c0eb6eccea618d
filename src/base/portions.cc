#include "base/portions.h"

#include <system_error>
#include <utility>

namespace longkv {

Portions::Portions(std::function<void(const Pause&)> work) {
  try {
    thread_ = std::thread([this, work] {
      pause();
      work([this] { pause(); });
      const std::lock_guard lock(mutex_);
      done_ = true;
      changed_.notify_all();
    });
  } catch (const std::system_error&) {
    work({});
    done_ = true;
  }
}

Portions::~Portions() {
  {
    const std::lock_guard lock(mutex_);
    until_ = Clock::time_point::max();
    go_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Portions::pause() {
  std::unique_lock lock(mutex_);
  if (Clock::now() < until_) return;
  paused_ = true;
  changed_.notify_all();
  // Whoever wakes too late for its portion still does one piece, or short portions would lead nowhere.
  changed_.wait(lock, [this] { return go_; });
  go_ = paused_ = false;
}

bool Portions::run_for(double seconds) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::unique_lock lock(mutex_);
  until_ = end;
  go_ = true;
  changed_.notify_all();
  changed_.wait_until(lock, end, [this] { return done_ || (paused_ && !go_); });
  return done_;
}

}  // namespace longkv
