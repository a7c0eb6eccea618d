// Long work that gets its time in portions: it runs on a thread of its own, but only while its owner lets it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace longkv {

// To be called by the work between pieces that are short against a portion; it returns when the work may go on. Empty:
// the work is not interrupted.
using Pause = std::function<void()>;

inline void pause_at(const Pause& pause) {
  if (pause) pause();
}

class Portions {
 public:
  // Nothing runs yet. Where the system has no thread to give, all of it is done here.
  explicit Portions(std::function<void(const Pause&)> work);
  // Lets the work run to its end.
  ~Portions();
  Portions(const Portions&) = delete;
  Portions& operator=(const Portions&) = delete;

  // Gives the work so much time and waits for as long, or until it has ended: whether it has. A piece that was begun is
  // ended meanwhile, so the owner leaves alone what the work uses until then.
  bool run_for(double seconds);

 private:
  using Clock = std::chrono::steady_clock;
  void pause();

  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point until_ = Clock::time_point::min();  // the work's portion ends
  bool go_ = false;                                     // a portion was given that the work has not seen yet
  bool paused_ = false;                                 // the work waits for one
  bool done_ = false;
  std::thread thread_;
};

}  // namespace longkv
