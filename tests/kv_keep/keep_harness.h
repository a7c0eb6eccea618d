// Helpers for tests of the keep stage: a keeper that follows orders, a small RoPE, attention over listed positions.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <set>

#include "kv/keep/keep.h"
#include "kv/layout.h"
#include "kv_session/harness.h"

namespace longkv::test {

// Keeps what the test says.
class ListKeeper : public Keeper {
 public:
  using Choose = std::function<void(const KeepInput&, KeepChoice&)>;
  explicit ListKeeper(Choose choose, KvRowFields fields = {.pos = true}) : choose_(std::move(choose)) {
    needs_.fields = fields;
    needs_.ragged = true;
  }
  KeepNeeds needs() const override { return needs_; }
  Status choose(const KeepInput& input, KeepChoice& choice) override {
    choose_(input, choice);
    return {};
  }
  int64_t planned_rows(int, int, int64_t tokens) const override { return tokens; }
  KeepNeeds needs_;

 private:
  Choose choose_;
};

inline void keep_everything(const KeepInput& input, KeepChoice& choice) {
  for (size_t h = 0; h < input.heads.size(); ++h) {
    choice.rows[h].clear();
    for (int64_t r = 0; r < input.heads[h].rows; ++r) choice.rows[h].push_back(r);
  }
}

inline std::unique_ptr<KvSession> make_kept_session(const KvShape& shape, const Recipe& recipe, int64_t capacity,
                                                    ThreadPool& pool, std::unique_ptr<Keeper> keeper,
                                                    KvRotate rotate = {}) {
  auto session = KvSession::create(shape, recipe, {capacity}, plain_params(shape), pool,
                                   KvSessionExtras{std::move(rotate), std::move(keeper)});
  EXPECT_TRUE(session.ok()) << session.status().message();
  return session.ok() ? std::move(session).value() : nullptr;
}

inline std::vector<RowRange> ranges_of(const std::vector<int64_t>& positions) {
  std::set<int64_t> sorted(positions.begin(), positions.end());
  std::vector<RowRange> ranges;
  for (const int64_t p : sorted) append_range(ranges, {p, p + 1});
  return ranges;
}

// Outputs are convex combinations of unit normal values; fp32 sums of some hundred terms.
constexpr double kKeepTolerance = 3e-5;

// The output of a token at which head j attends the given positions of its KV head.
inline void expect_attends(const KvShape& s, const Tokens& t, int64_t token,
                           const std::vector<std::vector<int64_t>>& positions, const float* out) {
  for (int j = 0; j < s.kv_heads * s.group_size; ++j) {
    const auto ranges = ranges_of(positions[size_t(j / s.group_size)]);
    const Partial p = reference_attend(s, t, token, j, ranges, 1.0 / std::sqrt(double(s.dim_k)));
    for (int c = 0; c < s.dim_v; ++c) {
      ASSERT_NEAR(out[int64_t(j) * s.dim_v + c], p.out[size_t(c)], kKeepTolerance)
          << "token " << token << " head " << j;
    }
  }
}

// RoPE of adjacent pairs with base 100: fast enough to matter over a few tokens.
inline void turn(double delta, float* rows, int64_t n, int64_t stride, int dim) {
  for (int64_t r = 0; r < n; ++r) {
    for (int i = 0; i < dim / 2; ++i) {
      const double angle = delta * std::pow(100.0, -2.0 * i / dim);
      float* x = rows + r * stride + 2 * i;
      const double a = x[0], b = x[1];
      x[0] = float(a * std::cos(angle) - b * std::sin(angle));
      x[1] = float(a * std::sin(angle) + b * std::cos(angle));
    }
  }
}

inline KvRotate test_rotate(int dim) {
  return [dim](int, double delta, float* rows, int64_t n, int64_t stride) { turn(delta, rows, n, stride, dim); };
}

// The same tokens with RoPE on queries and keys: token i at position i.
inline Tokens with_rope(const KvShape& s, Tokens t) {
  const int64_t n = int64_t(t.k.size()) / (s.kv_heads * s.dim_k);
  for (int64_t i = 0; i < n; ++i) {
    turn(double(i), t.q.data() + i * s.kv_heads * s.group_size * s.dim_k, s.kv_heads * s.group_size, s.dim_k, s.dim_k);
    turn(double(i), t.k.data() + i * s.kv_heads * s.dim_k, s.kv_heads, s.dim_k, s.dim_k);
  }
  return t;
}

// Bytes in memory of all K and V arrays and row fields.
inline int64_t resident_bytes(const KvCache& cache) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  int64_t bytes = 0;
  const auto add = [&](const void* p, int64_t size) {
    if (p == nullptr) return;
    std::vector<unsigned char> flags(size_t((size + page - 1) / page));
    EXPECT_EQ(::mincore(const_cast<void*>(p), size_t(size), flags.data()), 0);
    for (const unsigned char f : flags) bytes += (f & 1) * page;
  };
  const int64_t n = cache.capacity().v;
  for (int layer = 0; layer < cache.shape().layers; ++layer) {
    for (int h = 0; h < cache.shape().kv_heads; ++h) {
      const KvHeadView v = cache.view(layer, h);
      add(v.k, v.k_stride * n);
      add(v.v, v.v_stride * n);
      add(v.pos, n * 4);
      add(v.bias, n * 4);
      add(v.count, n * 2);
    }
  }
  return bytes;
}

// What bytes_used() may cost in memory: 5% and a page per array.
inline int64_t allowed_resident(const KvCache& cache) {
  const KvRowFields f = cache.fields();
  const int64_t arrays = 2 + (f.pos ? 1 : 0) + (f.bias ? 1 : 0) + (f.count ? 1 : 0);
  const int64_t heads = int64_t(cache.shape().layers) * cache.shape().kv_heads;
  return cache.bytes_used() + cache.bytes_used() / 20 + arrays * heads * ::sysconf(_SC_PAGESIZE);
}

}  // namespace longkv::test
