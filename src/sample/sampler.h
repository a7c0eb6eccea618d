// Chooses the next token from logits.
#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <span>
#include <unordered_map>
#include <vector>

#include "sample/params.h"

namespace longkv {

struct Candidate {
  int32_t id = 0;
  float logit = 0.0f;
};

class Sampler {
 public:
  // params must have passed validate().
  explicit Sampler(SamplingParams params);

  // The same seed and the same logits give the same tokens on every machine.
  int32_t sample(std::span<const float> logits);
  // Tells the penalties which token was taken (prompt tokens too, oldest first).
  void accept(int32_t id);

  // Candidates left after the chain, descending, with the logits they had then; what sample() draws from.
  const std::vector<Candidate>& candidates() const { return candidates_; }

 private:
  void apply(SamplerStage stage);
  bool penalises() const;
  void penalise();
  void sort_candidates();

  SamplingParams params_;
  std::mt19937_64 random_;
  std::deque<int32_t> recent_;
  std::unordered_map<int32_t, int64_t> counts_;  // of recent_
  std::vector<Candidate> candidates_;
  bool sorted_ = false;
};

}  // namespace longkv
