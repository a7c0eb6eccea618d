#include "base/threads.h"

#include <exception>
#include <system_error>

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
// The caller waits for tasks that are under way. One that takes this long probably sits on a core that another program
// has taken, which may be the caller's.
constexpr int kSpinsBeforeYield = 4000;

// Bit of `active_`. A worker joins a job by adding 1 while the bit is clear; the caller sets it when no task is left
// and waits for those inside only. A worker that has lost its core therefore delays a job by the task that it holds at
// most, not until it is scheduled again.
constexpr int kClosed = 1 << 30;

// A job whose tasks may throw, as any does when memory is not to be had. A worker must not die of it, which would end
// the process without a word, and the caller must not leave what others still use: the first exception waits for it.
struct GuardedJob {
  void (*call)(const void* fn, int64_t task, int worker);
  const void* fn;
  std::atomic<bool> failed{false};
  std::exception_ptr failure{};  // of whoever set `failed`

  static void run(const void* self, int64_t task, int worker) {
    auto* job = static_cast<GuardedJob*>(const_cast<void*>(self));
    if (job->failed.load(std::memory_order_relaxed)) return;  // the rest is not worth the work
    try {
      job->call(job->fn, task, worker);
    } catch (...) {
      if (!job->failed.exchange(true)) job->failure = std::current_exception();
    }
  }
};

}  // namespace

ThreadPool::ThreadPool(int threads) {
  active_.store(kClosed);
  try {
    for (int w = 1; w < threads; ++w) workers_.emplace_back([this, w] { work(w); });
  } catch (const std::system_error&) {
    // The system has no more threads to give; those that started serve.
  }
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
  const Trampoline call = call_;
  const void* fn = fn_;
  const int64_t tasks = tasks_;
  for (;;) {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) return;
    call(fn, task, worker);
  }
}

void ThreadPool::dispatch(int64_t tasks, Trampoline call, const void* fn) {
  GuardedJob job{call, fn};
  // The last job is closed and nobody is inside, so nobody reads these.
  call_ = &GuardedJob::run;
  fn_ = &job;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  active_.store(0, std::memory_order_release);
  epoch_.fetch_add(1);  // tells spinning workers
  if (sleepers_.load() > 0) {
    std::lock_guard lock(mutex_);  // a worker between its last check and its wait must see the new job
    wake_.notify_all();
  }
  drain(0);
  const bool alone = active_.fetch_or(kClosed, std::memory_order_acq_rel) == 0;
  for (int i = 0; !alone && active_.load(std::memory_order_acquire) != kClosed; ++i) {
    if (i < kSpinsBeforeYield) {
      cpu_relax();
    } else {
      std::this_thread::yield();
    }
  }
  if (job.failure) std::rethrow_exception(job.failure);
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
    int inside = active_.load(std::memory_order_acquire);
    while ((inside & kClosed) == 0 && !active_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) {
    }
    if ((inside & kClosed) != 0) continue;  // too late for this job
    drain(worker);
    active_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace longkv
