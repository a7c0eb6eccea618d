#include "base/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace longkv {

namespace {

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Jobs of a decode step follow each other within microseconds, so a worker spins that long before it sleeps.
constexpr int kSpins = 20000;

}  // namespace

ThreadPool::ThreadPool(int threads) {
  for (int w = 1; w < threads; ++w) workers_.emplace_back([this, w] { work(w); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_.store(true);
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& t : workers_) t.join();
}

void ThreadPool::drain(int worker) {
  for (;;) {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    call_(fn_, task, worker);
  }
}

void ThreadPool::dispatch(int64_t tasks, Trampoline call, const void* fn) {
  call_ = call;
  fn_ = fn;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  active_.store(int(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1);  // publishes the job to spinning workers
  if (sleepers_.load() > 0) {
    std::lock_guard lock(mutex_);  // a worker between its last check and its wait must see the new epoch
    wake_.notify_all();
  }
  drain(0);
  while (active_.load(std::memory_order_acquire) > 0) cpu_relax();
}

void ThreadPool::work(int worker) {
  uint64_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++i) cpu_relax();
    if (epoch_.load() == seen) {
      std::unique_lock lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return epoch_.load() != seen; });
      sleepers_.fetch_sub(1);
    }
    seen = epoch_.load();
    if (stop_.load()) return;
    drain(worker);
    active_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace longkv
