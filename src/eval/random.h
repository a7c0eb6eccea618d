// Random numbers of the generated tasks: the same on every machine and with every compiler, so that a sample is known
// by its identity alone.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace longkv {

// Prompts to measure with and prompts to learn from never share a seed: the space is the seed's highest bit.
enum class SeedSpace { kEval, kTrain };

// What a sample depends on. Samples can be made in any order and one at a time.
struct SampleId {
  SeedSpace space = SeedSpace::kEval;
  uint64_t root = 1;  // of the run
  std::string task;
  int version = 1;     // of the task's wording and construction
  int64_t length = 0;  // target tokens
  double depth = -1;   // percent of the document before the fact; negative: the task has none
  int64_t index = 0;

  uint64_t seed() const;
};

// xoshiro256** seeded by SplitMix64 (Blackman and Vigna).
class EvalRandom {
 public:
  // Streams of one seed with different names are independent.
  EvalRandom(uint64_t seed, std::string_view stream);

  uint64_t bits();
  uint64_t below(uint64_t n);                           // uniform in [0, n), n > 0; without the modulo's bias
  int64_t range(int64_t low, int64_t high);             // uniform in [low, high]
  double unit();                                        // [0, 1)
  std::string digits(int n);                            // n digits, the first not 0
  std::string hex(int n);                               // lower case
  std::string letters(int n, char first);               // n letters from the 26 that begin at `first`
  std::string uuid();                                   // version 4
  std::vector<int64_t> distinct(int64_t n, int64_t k);  // k different numbers below n, in random order; k <= n

  template <class T>
  const T& pick(const std::vector<T>& items) {
    return items[size_t(below(items.size()))];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[size_t(below(i))]);
  }

 private:
  uint64_t state_[4];
};

}  // namespace longkv
