#include "base/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "base/virtual_array.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "base/bandwidth.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Sum of `words` 64-bit words (a multiple of 256) in four streams, four vectors of each at a time.
uint64_t ReadAll(const uint64_t* p, size_t words) {
  const hn::ScalableTag<uint64_t> d;
  const size_t n = hn::Lanes(d);
  const size_t quarter = words / 4;
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (size_t i = 0; i < quarter; i += 4 * n) {
    for (size_t j = 0; j < 4; ++j) {
      const uint64_t* at = p + i + j * n;
      a = hn::Xor(a, hn::Load(d, at));
      b = hn::Xor(b, hn::Load(d, at + quarter));
      c = hn::Xor(c, hn::Load(d, at + 2 * quarter));
      e = hn::Xor(e, hn::Load(d, at + 3 * quarter));
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(ReadAll);

Result<ReadBandwidth> measure_read_bandwidth(ThreadPool& pool, size_t bytes, int passes,
                                             const std::atomic<bool>* cancel) {
  const auto cancelled = [cancel] { return cancel != nullptr && cancel->load(std::memory_order_relaxed); };
  // Several tasks per thread, so that one thread held up by another process does not set the figure.
  const size_t tasks = size_t(pool.threads()) * 8;
  const size_t words = std::max<size_t>(bytes / sizeof(uint64_t) / tasks / 256, 1) * 256;  // per task
  LONGKV_ASSIGN(VirtualArray array, VirtualArray::reserve(uint64_t(words) * tasks * sizeof(uint64_t)));
  array.advise_huge(array.size());
  auto* data = reinterpret_cast<uint64_t*>(array.data());
  constexpr size_t kTouched = size_t(2) << 20;  // at a time
  pool.run(ceil_div(int64_t(array.size()), int64_t(kTouched)), [&](int64_t t, int) {
    const size_t begin = size_t(t) * kTouched;
    if (!cancelled()) std::memset(array.data() + begin, 1, std::min(kTouched, size_t(array.size()) - begin));
  });

  std::atomic<uint64_t> sink{0};  // keeps the reads from being dropped
  std::vector<double> rates;
  for (int pass = 0; pass <= std::max(passes, 1); ++pass) {
    if (cancelled()) return fail(Code::kCancelled, "interrupted while the read bandwidth was measured");
    const auto start = std::chrono::steady_clock::now();
    pool.run(int64_t(tasks), [&](int64_t t, int) {
      sink.fetch_add(HWY_DYNAMIC_DISPATCH(ReadAll)(data + size_t(t) * words, words), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (pass > 0) rates.push_back(double(array.size()) / elapsed.count() * 1e-9);  // the first pass warms up
  }
  std::sort(rates.begin(), rates.end());
  return ReadBandwidth{rates.back(), rates[rates.size() / 2]};
}

}  // namespace longkv
#endif  // HWY_ONCE
