// Decoding allocates nothing once its buffers are warm.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "kv_session/harness.h"

namespace {
std::atomic<int64_t> allocations{0};
}

// Not inlined: where the compiler takes only one of a pair into its caller, it sees free() of memory from new.
[[gnu::noinline]] void* operator new(size_t n) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* p = std::malloc(n == 0 ? 1 : n);
  if (p == nullptr) std::abort();
  return p;
}
// std::stable_sort takes its buffer from this one and gives it back to the plain delete below.
[[gnu::noinline]] void* operator new(size_t n, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(n == 0 ? 1 : n);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace longkv::test {
namespace {

TEST(Allocation, SteadyDecodeAllocatesNothing) {
  const KvShape s = make_shape(2, 2, 4, 64);
  const Tokens t(s, 1, 5);
  std::vector<float> out(size_t(8 * 64));
  for (const IndexKind kind : {IndexKind::kNone, IndexKind::kMinMax, IndexKind::kBits}) {
    for (const SelectHeads heads : {SelectHeads::kPerKvHead, SelectHeads::kShared, SelectHeads::kPerQueryHead}) {
      Recipe r = full_f32();
      r.index.kind = kind;
      r.select.all = kind == IndexKind::kNone;
      r.select.budget = 256;
      r.select.heads = heads;
      r.select.aggregate = Aggregate::kSoftmaxSum;
      ThreadPool pool(2);
      auto session = make_session(s, r, 4096, pool);
      ASSERT_TRUE(session->fill_random(2000, 3).ok());
      const auto decode = [&](int steps) {
        for (int i = 0; i < steps; ++i) {
          for (int l = 0; l < 2; ++l) {
            ASSERT_TRUE(session->decode(l, t.q.data(), t.k.data(), t.v.data(), out.data()).ok());
          }
        }
      };
      decode(64);
      const int64_t before = allocations.load();
      decode(64);
      // A worker that meets its first task late warms its own buffers then; they do not grow with the steps.
      EXPECT_LE(allocations.load() - before, 4) << int(kind) << " heads " << int(heads);
    }
  }
}

}  // namespace
}  // namespace longkv::test
