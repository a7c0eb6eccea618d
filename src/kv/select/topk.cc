#include "kv/select/topk.h"

#include <algorithm>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/select/topk.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;

// The largest of each group of `per_group` scores, a lane's in consecutive vectors; scores after the last whole vector
// of groups belong to none. Returns how many groups there are. NaN counts as -inf.
int64_t GroupMaxima(const float* s, int64_t n, int64_t per_group, float* maxima) {
  const D d;
  const int64_t lanes = int64_t(hn::Lanes(d)), step = per_group * lanes;
  int64_t count = 0;
  for (int64_t i = 0; i + step <= n; i += step, count += lanes) {
    auto top = hn::Set(d, -std::numeric_limits<float>::infinity());
    for (int64_t j = i; j < i + step; j += lanes) {
      const auto x = hn::LoadU(d, s + j);
      top = hn::IfThenElse(hn::Gt(x, top), x, top);
    }
    hn::StoreU(top, d, maxima + count);
  }
  return count;
}

// Appends the entries (topk.cc) of scores >= bound, by ascending index. Few are: four vectors without one cost a
// branch.
void EntriesFrom(const float* s, int64_t n, float bound, std::vector<uint64_t>& entries) {
  const D d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  const auto least = hn::Set(d, bound);
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (s[i] >= bound) entries.push_back((uint64_t(~score_key(s[i])) << 32) | uint64_t(i));
    }
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto found = [&](int64_t v) HWY_ATTR { return hn::Ge(hn::LoadU(d, s + i + v * lanes), least); };
    if (!hn::AllFalse(d, hn::Or(hn::Or(found(0), found(1)), hn::Or(found(2), found(3))))) add(i, i + 4 * lanes);
  }
  add(i, n);
}

// The k best, 0 < k < n, ascending: keys in order as whole numbers, of which the k-th largest is found by halving.
// keys: room for n and a vector.
void PickFew(const float* s, int64_t n, int64_t k, int32_t* keys, int64_t* picked) {
  const D d;
  const hn::RebindToSigned<D> di;
  const int64_t lanes = int64_t(hn::Lanes(d));
  auto least = hn::Set(di, INT32_MAX), most = hn::Set(di, INT32_MIN);
  const auto key_of = [&](auto x) HWY_ATTR {
    x = hn::IfThenElse(hn::Eq(x, x), x, hn::Set(d, -std::numeric_limits<float>::infinity()));
    const auto bits = hn::BitCast(di, hn::Add(x, hn::Zero(d)));  // -0 becomes +0
    return hn::Xor(bits, hn::And(hn::BroadcastSignBit(bits), hn::Set(di, INT32_MAX)));
  };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto key = key_of(hn::LoadU(d, s + i));
    least = hn::Min(least, key);
    most = hn::Max(most, key);
    hn::StoreU(key, di, keys + i);
  }
  int64_t low = hn::GetLane(hn::MinOfLanes(di, least)), high = hn::GetLane(hn::MaxOfLanes(di, most));
  hn::StoreU(hn::Set(di, INT32_MIN), di, keys + i);  // below all keys
  for (; i < n; ++i) {
    keys[i] = int32_t(score_key(s[i]) ^ 0x80000000u);
    low = HWY_MIN(low, int64_t{keys[i]});
    high = HWY_MAX(high, int64_t{keys[i]});
  }
  const auto count_above = [&](int64_t bound) HWY_ATTR {
    const auto b = hn::Set(di, int32_t(bound));
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += lanes) count += int64_t(hn::CountTrue(di, hn::Gt(hn::LoadU(di, keys + j), b)));
    return count;
  };
  // At least k keys reach `low`, fewer than k are above `high`.
  int64_t reached = n;
  while (low < high && reached != k) {
    const int64_t middle = low + (high - low + 1) / 2, count = count_above(middle - 1);
    if (count >= k) {
      low = middle;
      reached = count;
    } else {
      high = middle - 1;
    }
  }
  int64_t equal = reached == k ? n : k - count_above(low);  // how many of those that equal `low` are picked
  const auto bound = hn::Set(di, int32_t(low - 1));
  for (int64_t j = 0, at = 0; at < k; j += lanes) {
    uint8_t bytes[8] = {};
    hn::StoreMaskBits(di, hn::Gt(hn::LoadU(di, keys + j), bound), bytes);
    uint64_t bits = 0;
    std::memcpy(&bits, bytes, sizeof(bits));
    for (; bits != 0; bits &= bits - 1) {
      const int64_t one = j + std::countr_zero(bits);
      if (keys[one] == low && equal-- <= 0) continue;
      picked[at++] = one;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(GroupMaxima);
HWY_EXPORT(EntriesFrom);
HWY_EXPORT(PickFew);

namespace {

constexpr int kBinBits = 11, kBins = 1 << kBinBits, kShift = 32 - kBinBits;

// Of numbers counted in bins, the last bin counted down from the best one that the k-th lies in; `above`: how many lie
// in better ones.
int bin_of_kth(const uint32_t (&counts)[kBins], int64_t k, int64_t& above) {
  int bin = kBins - 1;
  while (above + counts[bin] < k) above += counts[bin--];
  return bin;
}

// A score that at least k of `n` >= k numbers reach and few more do: the k-th largest of them without its last bits.
float reached_by(const float* x, int64_t n, int64_t k) {
  uint32_t counts[kBins] = {}, finer[kBins] = {};
  for (int64_t i = 0; i < n; ++i) ++counts[score_key(x[i]) >> kShift];
  int64_t above = 0;
  const uint32_t bin = uint32_t(bin_of_kth(counts, k, above));
  constexpr int kFiner = kShift - kBinBits;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = score_key(x[i]);
    if (key >> kShift == bin) ++finer[key >> kFiner & (kBins - 1)];
  }
  const uint32_t key = bin << kShift | uint32_t(bin_of_kth(finer, k, above)) << kFiner;
  return std::bit_cast<float>((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// So few are settled by halving; more by counting.
constexpr int64_t kFew = 4096;
// Most groups whose maxima are compared, and how many scores a group must have for that to pay.
constexpr int64_t kMaxGroups = 8192, kMinGroup = 4;

// Leaves in `entries` all scores that may be among the k best, by ascending index, when that is a small part of them.
// At least k scores reach the k-th largest of the maxima of groups; with four times as many groups as k, hardly more.
bool narrow(const float* scores, int64_t n, int64_t k, std::vector<uint64_t>& entries) {
  if (k + k / 4 > kMaxGroups) return false;
  const int64_t per_group = n / std::clamp<int64_t>(4 * k, 256, kMaxGroups) + 1;
  if (per_group < kMinGroup) return false;
  float maxima[kMaxGroups];
  const int64_t groups = HWY_DYNAMIC_DISPATCH(GroupMaxima)(scores, n, per_group, maxima);
  if (groups < k + k / 4) return false;
  const float bound = reached_by(maxima, groups, k);
  if (!(bound > -std::numeric_limits<float>::infinity())) return false;  // NaN ranks there too
  entries.clear();
  HWY_DYNAMIC_DISPATCH(EntriesFrom)(scores, n, bound, entries);
  return true;
}

}  // namespace

void top_k(const float* scores, int64_t n, int64_t k, std::vector<uint64_t>& scratch, std::vector<int64_t>& picked) {
  k = std::clamp<int64_t>(k, 0, n);
  picked.resize(size_t(k));
  if (k == n) {
    for (int64_t i = 0; i < n; ++i) picked[size_t(i)] = i;
    return;
  }
  if (n <= kFew && k > 0) {
    int32_t keys[kFew + 64];
    HWY_DYNAMIC_DISPATCH(PickFew)(scores, n, k, keys, picked.data());
    return;
  }
  // An entry is one 64-bit number per score, smaller is better: the inverted key above the index. All are different, so
  // the best are one well-defined set whatever the algorithm. Indices stay below 2^32: an index has at most one block
  // per row. Most scores are settled by the leading bits of their key: those above the bin where the k-th one lies are
  // picked as they come, those below it never, and only the bin itself is ordered.
  uint32_t counts[kBins] = {};
  int64_t above = 0, at = 0;
  if (narrow(scores, n, k, scratch)) {
    for (const uint64_t entry : scratch) ++counts[uint32_t(~entry >> 32) >> kShift];
    const uint32_t bin = uint32_t(bin_of_kth(counts, k, above));
    size_t left = 0;
    for (const uint64_t entry : scratch) {
      const uint32_t key = uint32_t(~entry >> 32);
      if (key >> kShift > bin) picked[size_t(at++)] = int64_t(entry & 0xffffffffu);
      if (key >> kShift == bin) scratch[left++] = entry;
    }
    scratch.resize(left);
  } else {
    for (int64_t i = 0; i < n; ++i) ++counts[score_key(scores[i]) >> kShift];
    const uint32_t bin = uint32_t(bin_of_kth(counts, k, above));
    scratch.clear();
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = score_key(scores[i]);
      if (key >> kShift > bin) picked[size_t(at++)] = i;
      if (key >> kShift == bin) scratch.push_back((uint64_t(~key) << 32) | uint64_t(i));
    }
  }
  const auto wanted = scratch.begin() + (k - above);
  std::nth_element(scratch.begin(), wanted, scratch.end());
  for (auto it = scratch.begin(); it != wanted; ++it) picked[size_t(at++)] = int64_t(*it & 0xffffffffu);
  std::sort(picked.begin() + above, picked.end());
  // Two ascending runs become one; the first waits in `scratch`, so that nothing is overwritten before it is read.
  scratch.resize(size_t(above));
  for (int64_t i = 0; i < above; ++i) scratch[size_t(i)] = uint64_t(picked[size_t(i)]);
  int64_t i = 0, j = above;
  for (int64_t out = 0; i < above; ++out) {
    const bool second = j < k && picked[size_t(j)] < int64_t(scratch[size_t(i)]);
    picked[size_t(out)] = second ? picked[size_t(j++)] : int64_t(scratch[size_t(i++)]);
  }
}

}  // namespace longkv
#endif  // HWY_ONCE
