// The yardstick of decoding: how fast this machine reads memory.
#pragma once

#include <atomic>
#include <cstddef>

#include "base/threads.h"
#include "longkv/status.h"

namespace longkv {

struct ReadBandwidth {
  double best = 0.0;    // GB/s (1e9 bytes), the fastest pass
  double median = 0.0;  // GB/s
};

// Reads `bytes` of memory (a multiple of the pool's threads is best) several times with all threads of the pool: each
// thread walks a contiguous share in four streams with vector loads, from huge pages where the system has them. The
// figure is that of memory only if `bytes` is well above the last-level cache. Errors: kOutOfMemory; kCancelled soon
// after `cancel` was set: the first touch of memory can take seconds.
Result<ReadBandwidth> measure_read_bandwidth(ThreadPool& pool, size_t bytes, int passes = 9,
                                             const std::atomic<bool>* cancel = nullptr);

}  // namespace longkv
