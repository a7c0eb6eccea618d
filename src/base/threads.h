// A pool of worker threads owned by whoever runs a model; there is no global pool.
//
// Results must never depend on the number of threads. Callers therefore split work by the shape of the data, never by
// the number of workers, and merge in index order; the pool only decides who runs which piece.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace longkv {

class ThreadPool {
 public:
  // `threads` counts the calling thread: ThreadPool(1) starts no worker. Where the system refuses to start so many,
  // there are fewer; threads() tells.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Calls fn(task, worker) for every task in [0, tasks), worker in [0, threads()), and returns when all are done.
  // Tasks are handed out dynamically in ascending order. fn must not throw and must not call the same pool.
  template <class Fn>
  void run(int64_t tasks, const Fn& fn) {
    if (tasks <= 0) return;
    if (tasks == 1 || workers_.empty()) {
      for (int64_t t = 0; t < tasks; ++t) fn(t, 0);
      return;
    }
    dispatch(
        tasks, [](const void* f, int64_t t, int w) { (*static_cast<const Fn*>(f))(t, w); }, &fn);
  }

 private:
  using Trampoline = void (*)(const void* fn, int64_t task, int worker);

  void dispatch(int64_t tasks, Trampoline call, const void* fn);
  void work(int worker);
  void drain(int worker);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  // One job at a time: `epoch_` counts them; `active_` counts the workers inside, with a bit that says it is closed.
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> active_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  Trampoline call_ = nullptr;
  const void* fn_ = nullptr;
  int64_t tasks_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace longkv
