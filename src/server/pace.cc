#include "server/pace.h"

#include <algorithm>

namespace longkv::server {

namespace {

// Share of a new value in a running quantile: a tenth of values in a row doubles or halves it.
constexpr double kFollow = 0.07;
constexpr double kStepQuantile = 0.4, kTokenQuantile = 0.7;
// A turn is late that would take more than this many ordinary steps and the share of other work: by its answers'
// growth, or because the machine did something else.
constexpr double kLate = 1.5;
constexpr int kMostLate = 3;

// Moves `estimate` towards the given quantile of the values. Unlike a mean it does not follow the few values that other
// programs on the machine have stretched.
void follow(double& estimate, double value, double quantile) {
  if (estimate == 0) estimate = value;
  estimate *= value > estimate ? 1 + kFollow * quantile : 1 - kFollow * (1 - quantile);
}

}  // namespace

void Pace::step(size_t slots, double seconds, bool beside) {
  last_ = std::min(slots, steps_.size());
  StepSeconds& steps = steps_[last_ - 1];
  follow(beside ? steps.beside : steps.alone, seconds, kStepQuantile);
}

void Pace::piece(int64_t tokens, double seconds) {
  if (tokens > 0) follow(token_seconds_, seconds / double(tokens), kTokenQuantile);
}

double Pace::ordinary_step() const {
  if (last_ == 0) return 0;
  const StepSeconds& steps = steps_[last_ - 1];
  return steps.alone > 0 ? steps.alone : steps.beside;
}

bool Pace::late(double seconds, double least) {
  const bool over = seconds + least > (kLate + share_) * ordinary_step();
  late_ = over && late_ < kMostLate ? late_ + 1 : 0;
  return late_ > 0;
}

}  // namespace longkv::server
