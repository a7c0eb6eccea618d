// Rows of random tokens on the card, and attention over them in full precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "cuda/card.h"
#include "cuda/kv.h"

namespace longkv {

using card::CardKv;
using test::OnCard;

struct Shape {
  KvType type = KvType::kF16;
  int heads = 4, kv_heads = 2, dim = 64;
  int64_t capacity = 0;
};

// q, k, v of n tokens after products, their rotation in double, and the same on the card.
struct Tokens {
  Shape s;
  int64_t n;
  std::vector<float> qkv;
  std::vector<double> turned;  // the same after rotation
  OnCard kv_memory, q;
  CardKv kv;

  const double* row(int64_t t, int head) const {
    return &turned[size_t((t * (s.heads + 2 * s.kv_heads) + head) * s.dim)];
  }
};

inline card::CardRope make_rope(int half, RopePairs pairs, int64_t positions, std::vector<OnCard>& keep) {
  std::vector<double> fine, coarse;
  const auto angle = [&](int64_t p, int i) { return double(p) * std::pow(10000.0, -2.0 * i / (2 * half)); };
  for (int64_t p = 0; p < 1024; ++p)
    for (int i = 0; i < half; ++i) fine.insert(fine.end(), {std::cos(angle(p, i)), std::sin(angle(p, i))});
  for (int64_t p = 0; p <= positions; p += 1024)
    for (int i = 0; i < half; ++i) coarse.insert(coarse.end(), {std::cos(angle(p, i)), std::sin(angle(p, i))});
  keep.push_back(OnCard::of(fine));
  keep.push_back(OnCard::of(coarse));
  return {keep[keep.size() - 2].as<double>(), keep.back().as<double>(), half, pairs, 1.25f};
}

// Appends n tokens at positions [0, n) in two pieces. value(position, v): what a value is to be instead of v.
inline Tokens make_tokens(const Shape& s, int64_t n, uint32_t seed, RopePairs pairs = RopePairs::kHalves,
                          int rotated = 0, const std::function<float(int64_t, float)>& value = nullptr) {
  const int all = s.heads + 2 * s.kv_heads, half = (rotated > 0 ? rotated : s.dim) / 2;
  Tokens t{s,
           n,
           test::normal_floats(n * all * s.dim, seed),
           {},
           OnCard(card::card_kv_bytes(s.type, s.kv_heads, s.dim, s.capacity)),
           OnCard(n * s.heads * s.dim * 2),
           {}};
  t.kv = card::place_kv(s.type, s.kv_heads, s.dim, s.capacity, t.kv_memory.data());
  for (int64_t p = 0; value && p < n; ++p) {
    float* values = &t.qkv[size_t((p * all + s.heads + s.kv_heads) * s.dim)];
    for (int i = 0; i < s.kv_heads * s.dim; ++i) values[i] = value(p, values[i]);
  }
  std::vector<OnCard> keep;
  const card::CardRope rope = make_rope(half, pairs, n, keep);
  const OnCard in = OnCard::of(t.qkv);
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, n / 2}, {n / 2, n - n / 2}}) {
    if (count == 0) continue;
    const std::vector<int64_t> position = {first};
    const OnCard at = OnCard::of(position), angles(count * 2 * half * 4);
    EXPECT_TRUE(card::rope_angles(rope, at.as<int64_t>(), count, angles.as<float>(), nullptr).ok());
    card::AppendArgs a;
    a.qkv = in.as<float>() + first * all * s.dim;
    a.n = count;
    a.heads = s.heads;
    a.angles = angles.as<float>();
    a.rope = rope;
    a.first = at.as<int64_t>();
    a.q = t.q.as<card::half_t>() + first * s.heads * s.dim;
    a.kv = t.kv;
    EXPECT_TRUE(card::append_rows(a, nullptr).ok());
    OnCard::check(cudaDeviceSynchronize());
  }
  t.turned.assign(t.qkv.begin(), t.qkv.end());
  for (int64_t p = 0; p < n; ++p) {
    for (int h = 0; h < s.heads + s.kv_heads; ++h) {
      double* x = &t.turned[size_t((p * all + h) * s.dim)];
      for (int i = 0; i < half; ++i) {
        const double angle = double(p) * std::pow(10000.0, -2.0 * i / (2 * half));
        double& a = pairs == RopePairs::kHalves ? x[i] : x[2 * i];
        double& b = pairs == RopePairs::kHalves ? x[i + half] : x[2 * i + 1];
        const double c = 1.25 * std::cos(angle), d = 1.25 * std::sin(angle), a0 = a, b0 = b;
        a = a0 * c - b0 * d;
        b = a0 * d + b0 * c;
      }
    }
  }
  return t;
}

// Full precision attention of the token at `position`, one query head. bias: of the KV head's rows; rows of minus
// infinity count for nothing.
inline std::vector<double> attention_of(const Tokens& t, int64_t position, int head, double scale, double cap,
                                        int64_t window, std::span<const float> bias = {}) {
  const int kv_head = head / (t.s.heads / t.s.kv_heads);
  const int64_t begin = window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
  std::vector<double> score, out(size_t(t.s.dim));
  double top = -1e300, sum = 0;
  for (int64_t r = begin; r <= position; ++r) {
    double s = 0;
    for (int i = 0; i < t.s.dim; ++i) s += t.row(position, head)[i] * t.row(r, t.s.heads + kv_head)[i];
    s *= scale;
    if (cap > 0) s = cap * std::tanh(s / cap);
    if (!bias.empty()) s += double(bias[size_t(r)]);
    score.push_back(s);
    top = std::max(top, s);
  }
  for (double& s : score) sum += s = std::exp(s - top);
  for (int64_t r = begin; r <= position; ++r) {
    const double w = score[size_t(r - begin)] / sum;
    for (int i = 0; i < t.s.dim; ++i) out[size_t(i)] += w * t.row(r, t.s.heads + t.s.kv_heads + kv_head)[i];
  }
  return out;
}

// Memory for the attention of one token, in so many pieces.
class OneToken {
 public:
  OneToken(int heads, int dim, int splits)
      : heads_(heads),
        dim_(dim),
        memory_(card::DecodeScratch::bytes(heads, splits, dim)),
        row_(card::CardRow::bytes(heads * dim)),
        scratch_{splits, memory_.as<float>(), memory_.as<float>() + int64_t(heads) * splits * dim} {}

  // [heads][dim], of the token whose own row is `position`.
  std::vector<float> attend(const card::AttendArgs& a, int64_t position, const card::TileList& list = {}) const {
    const OnCard at = OnCard::of(std::vector<int64_t>{position});
    EXPECT_DONE(card::attend_token(a, list, at.as<int64_t>(), scratch_, nullptr));
    EXPECT_DONE(card::merge_partials(scratch_, heads_, dim_, card::CardRow::at(row_.data(), heads_ * dim_), nullptr));
    return row_.read<float>(heads_ * dim_);
  }

 private:
  int heads_, dim_;
  OnCard memory_, row_;
  card::DecodeScratch scratch_;
};

inline constexpr KvType kRowTypes[] = {KvType::kF16, KvType::kBf16, KvType::kQ8_0, KvType::kQ4_0, KvType::kFp8};

// What rounding of queries and weights does to an output of unit size: a few units of the type's last place.
inline double tolerance(KvType type) { return type == KvType::kBf16 ? 0.06 : 0.01; }

// The largest error of a stored value, `top` being the largest magnitude of its row: a half step, and for q4_0, whose
// range is lopsided, a whole one.
inline double storing_error(KvType type, double value, double top) {
  switch (type) {
    case KvType::kF16: return top * 0x1p-10;
    case KvType::kBf16: return top * 0x1p-8;
    case KvType::kQ8_0: return top / 240;
    case KvType::kFp8: return std::abs(value) / 15 + top / 448 / 128;
    default: return top / 8 * 1.001;
  }
}

// From now on the rows of keys and values are what those stored read back as, in halves.
inline void use_stored_rows(Tokens& t) {
  const OnCard memory(card::card_kv_bytes(KvType::kF16, t.s.kv_heads, t.s.dim, t.s.capacity));
  const CardKv work = card::place_kv(KvType::kF16, t.s.kv_heads, t.s.dim, t.s.capacity, memory.data());
  ASSERT_DONE(card::decode_rows(t.kv, 0, t.n, work, nullptr));
  const auto rows = memory.read<uint16_t>(2 * t.s.kv_heads * t.s.capacity * t.s.dim);
  for (int h = 0; h < 2 * t.s.kv_heads; ++h) {
    for (int64_t r = 0; r < t.n; ++r) {
      double* to = const_cast<double*>(t.row(r, t.s.heads + h));
      for (int i = 0; i < t.s.dim; ++i) to[i] = test::half_float(rows[size_t((h * t.s.capacity + r) * t.s.dim + i)]);
    }
  }
}

inline void expect_near(const std::vector<double>& want, const float* have, double allowed) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(std::isfinite(have[i]));
    error += (have[i] - want[i]) * (have[i] - want[i]);
    norm += want[i] * want[i];
  }
  EXPECT_LE(std::sqrt(error), allowed * std::sqrt(norm));
}

}  // namespace longkv
