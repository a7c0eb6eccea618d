#include "eval/random.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <bit>
#include <cmath>
#include <unordered_set>

namespace longkv {

namespace {

constexpr uint64_t kTrainBit = uint64_t(1) << 63;

uint64_t split_mix(uint64_t& x) {
  uint64_t z = (x += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

uint64_t SampleId::seed() const {
  // Thousandths of a percent, so that the text of a depth does not depend on how numbers are printed.
  const int64_t thousandths = depth < 0 ? -1 : std::llround(depth * 1000);
  const std::string identity = fmt::format("{}|{}|{}|{}|{}|{}", root, task, version, length, thousandths, index);
  const uint64_t hash = XXH64(identity.data(), identity.size(), 0);
  return space == SeedSpace::kTrain ? hash | kTrainBit : hash & ~kTrainBit;
}

EvalRandom::EvalRandom(uint64_t seed, std::string_view stream) {
  uint64_t x = XXH64(stream.data(), stream.size(), seed);
  for (uint64_t& s : state_) s = split_mix(x);
}

uint64_t EvalRandom::bits() {
  const uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
  const uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

uint64_t EvalRandom::below(uint64_t n) {
  const uint64_t rest = (0 - n) % n;  // 2^64 mod n values at the bottom are refused
  uint64_t x = bits();
  while (x < rest) x = bits();
  return x % n;
}

int64_t EvalRandom::range(int64_t low, int64_t high) { return low + int64_t(below(uint64_t(high - low) + 1)); }
double EvalRandom::unit() { return double(bits() >> 11) * 0x1p-53; }

std::string EvalRandom::digits(int n) {
  std::string text;
  for (int i = 0; i < n; ++i) text += char('0' + range(i == 0 ? 1 : 0, 9));
  return text;
}

std::string EvalRandom::hex(int n) {
  std::string text;
  for (int i = 0; i < n; ++i) text += "0123456789abcdef"[below(16)];
  return text;
}

std::string EvalRandom::letters(int n, char first) {
  std::string text;
  for (int i = 0; i < n; ++i) text += char(first + char(below(26)));
  return text;
}

std::string EvalRandom::uuid() {
  std::string h = hex(32);
  h[12] = '4';
  h[16] = "89ab"[below(4)];
  return h.substr(0, 8) + "-" + h.substr(8, 4) + "-" + h.substr(12, 4) + "-" + h.substr(16, 4) + "-" + h.substr(20);
}

std::vector<int64_t> EvalRandom::distinct(int64_t n, int64_t k) {
  // Floyd's method: k draws whatever n is.
  std::unordered_set<int64_t> taken;
  std::vector<int64_t> chosen;
  for (int64_t j = n - k; j < n; ++j) {
    const int64_t t = range(0, j);
    chosen.push_back(taken.insert(t).second ? t : j);
    taken.insert(chosen.back());
  }
  shuffle(chosen);
  return chosen;
}

}  // namespace longkv
