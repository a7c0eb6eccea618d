#include "sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace longkv {

namespace {

bool before(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// Softmax over sorted candidates.
std::vector<double> probabilities(const std::vector<Candidate>& c) {
  std::vector<double> p(c.size());
  double sum = 0.0;
  for (size_t i = 0; i < c.size(); ++i) {
    p[i] = std::exp(double(c[i].logit) - double(c.front().logit));
    sum += p[i];
  }
  for (double& v : p) v /= sum;
  return p;
}

// The k best in order. A bounded heap keeps this linear in the vocabulary: few candidates beat the worst one held.
void keep_top_k(std::vector<Candidate>& c, size_t k) {
  if (c.size() > k) {
    std::make_heap(c.begin(), c.begin() + long(k), before);
    for (size_t i = k; i < c.size(); ++i) {
      if (!before(c[i], c.front())) continue;
      std::pop_heap(c.begin(), c.begin() + long(k), before);
      c[k - 1] = c[i];
      std::push_heap(c.begin(), c.begin() + long(k), before);
    }
    c.resize(k);
  }
  std::sort(c.begin(), c.end(), before);
}

void keep_top_p(std::vector<Candidate>& c, float top_p) {
  const std::vector<double> p = probabilities(c);
  double sum = 0.0;
  for (size_t i = 0; i < c.size(); ++i) {
    sum += p[i];
    if (sum >= double(top_p)) {
      c.resize(i + 1);
      return;
    }
  }
}

void keep_min_p(std::vector<Candidate>& c, float min_p) {
  const float least = c.front().logit + std::log(min_p);
  size_t n = 1;
  while (n < c.size() && c[n].logit >= least) ++n;
  c.resize(n);
}

// Locally typical sampling (arXiv 2202.00666): tokens whose surprise is closest to the entropy, up to mass `typical`.
void keep_typical(std::vector<Candidate>& c, float typical) {
  const std::vector<double> p = probabilities(c);
  double entropy = 0.0;
  for (double v : p) {
    if (v > 0.0) entropy -= v * std::log(v);
  }
  std::vector<size_t> order(c.size());
  std::vector<double> distance(c.size());
  for (size_t i = 0; i < c.size(); ++i) {
    order[i] = i;
    distance[i] = p[i] > 0.0 ? std::fabs(-std::log(p[i]) - entropy) : HUGE_VAL;
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return distance[a] < distance[b] || (distance[a] == distance[b] && a < b); });
  double sum = 0.0;
  std::vector<Candidate> kept;
  for (size_t i : order) {
    kept.push_back(c[i]);
    sum += p[i];
    if (sum >= double(typical)) break;
  }
  std::sort(kept.begin(), kept.end(), before);
  c = std::move(kept);
}

// The greatest of all logits, of equal ones the first, without a list of candidates; nullopt where biases make that
// more than a few comparisons.
std::optional<Candidate> greatest(std::span<const float> logits, std::span<const std::pair<int32_t, float>> biases) {
  constexpr size_t kMostBiases = 8;
  if (biases.size() > kMostBiases) return std::nullopt;
  // Several maxima side by side, which compilers turn into vectors.
  constexpr size_t kLanes = 16;
  float most[kLanes];
  std::fill_n(most, kLanes, logits.front());
  size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (size_t l = 0; l < kLanes; ++l) most[l] = logits[i + l] > most[l] ? logits[i + l] : most[l];
  }
  for (; i < logits.size(); ++i) most[0] = std::max(most[0], logits[i]);
  const auto at = std::find(logits.begin(), logits.end(), *std::max_element(most, most + kLanes));
  Candidate best{int32_t(at - logits.begin()), *at};
  const Candidate unbiased = best;
  for (size_t b = 0; b < biases.size(); ++b) {
    const auto [id, bias] = biases[b];
    const bool twice =
        std::any_of(biases.begin(), biases.begin() + long(b), [id = id](const auto& o) { return o.first == id; });
    if (twice || id == unbiased.id) return std::nullopt;
    if (size_t(id) >= logits.size()) continue;
    const Candidate lifted{id, logits[size_t(id)] + bias};
    if (before(lifted, best)) best = lifted;
  }
  return best;
}

}  // namespace

Sampler::Sampler(SamplingParams params) : params_(std::move(params)), random_(params_.seed) {}

void Sampler::accept(int32_t id) {
  if (params_.repeat_last_n == 0) return;
  recent_.push_back(id);
  ++counts_[id];
  if (params_.repeat_last_n > 0 && int64_t(recent_.size()) > params_.repeat_last_n) {
    const auto oldest = counts_.find(recent_.front());
    if (--oldest->second == 0) counts_.erase(oldest);
    recent_.pop_front();
  }
}

bool Sampler::penalises() const {
  return !counts_.empty() &&
         (params_.repeat_penalty != 1.0f || params_.presence_penalty != 0.0f || params_.frequency_penalty != 0.0f);
}

void Sampler::penalise() {
  if (!penalises()) return;
  for (Candidate& c : candidates_) {
    const auto seen = counts_.find(c.id);
    if (seen == counts_.end()) continue;
    // A penalty above 1 must lower the logit whatever its sign.
    c.logit = c.logit > 0.0f ? c.logit / params_.repeat_penalty : c.logit * params_.repeat_penalty;
    c.logit -= float(seen->second) * params_.frequency_penalty + params_.presence_penalty;
  }
  sorted_ = false;
}

void Sampler::sort_candidates() {
  if (!sorted_) std::sort(candidates_.begin(), candidates_.end(), before);
  sorted_ = true;
}

void Sampler::apply(SamplerStage stage) {
  switch (stage) {
    case SamplerStage::kPenalties: penalise(); return;
    case SamplerStage::kTopK:
      if (params_.top_k <= 0) return;
      keep_top_k(candidates_, std::min(candidates_.size(), size_t(params_.top_k)));
      sorted_ = true;
      return;
    case SamplerStage::kTypical:
      if (params_.typical >= 1.0f) return;
      sort_candidates();
      keep_typical(candidates_, params_.typical);
      return;
    case SamplerStage::kTopP:
      if (params_.top_p >= 1.0f) return;
      sort_candidates();
      keep_top_p(candidates_, params_.top_p);
      return;
    case SamplerStage::kMinP:
      if (params_.min_p <= 0.0f) return;
      sort_candidates();
      keep_min_p(candidates_, params_.min_p);
      return;
    case SamplerStage::kTemperature: {
      if (candidates_.empty()) return;
      // By differences from the largest: quotients of a tiny temperature would overflow.
      const float top = std::min_element(candidates_.begin(), candidates_.end(), before)->logit;
      for (Candidate& c : candidates_) c.logit = (c.logit - top) / params_.temperature;
      return;
    }
  }
}

int32_t Sampler::sample(std::span<const float> logits) {
  if (params_.temperature <= 0.0f && !penalises()) {
    if (const auto best = greatest(logits, params_.logit_bias)) {
      candidates_.assign(1, *best);
      return best->id;
    }
  }
  candidates_.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) candidates_[i] = {int32_t(i), logits[i]};
  for (const auto& [id, bias] : params_.logit_bias) {
    if (size_t(id) < candidates_.size()) candidates_[size_t(id)].logit += bias;
  }
  sorted_ = false;
  if (params_.temperature <= 0.0f) {
    // Greedy: penalties still count, cuts cannot change the best candidate.
    for (SamplerStage stage : params_.stages) {
      if (stage == SamplerStage::kPenalties) penalise();
    }
    const Candidate best = *std::min_element(candidates_.begin(), candidates_.end(), before);
    candidates_.assign(1, best);
    return best.id;
  }
  for (SamplerStage stage : params_.stages) apply(stage);
  sort_candidates();
  const std::vector<double> p = probabilities(candidates_);
  // 53 random bits to [0, 1): the standard distributions differ between library implementations.
  double left = double(random_() >> 11) * 0x1p-53;
  for (size_t i = 0; i < p.size(); ++i) {
    left -= p[i];
    if (left < 0.0) return candidates_[i].id;
  }
  return candidates_.back().id;
}

}  // namespace longkv
