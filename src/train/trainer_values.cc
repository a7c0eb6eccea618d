// From learned values to how the student sees old rows, and from the gradient of that to theirs.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/identity.h"
#include "train/trainer.h"

namespace longkv {

namespace {

constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8;
constexpr double kMostScale = 1.5;  // of a kept channel under a mask

}  // namespace

OldMask Trainer::Student::mask(const TrainOptions& options, const ChunkTape* teacher) const {
  OldMask m;
  m.kind = options.learned == Learned::kGates ? OldRows::kGates : OldRows::kMixed;
  m.values = values.data();
  m.compensate = options.compensate;
  m.heads = heads;
  m.teacher = teacher;
  return m;
}

// For channels in the second stage, alpha where the mask keeps it.
std::vector<float> Trainer::effective_alpha(const std::vector<float>& values, ChannelCounts* counts) const {
  if (state_.stage < 2) return values;
  const ChannelCounts chosen =
      options_.frozen_counts() ? state_.frozen : counts_by_threshold(shape_, values, options_.ratio, options_.align);
  std::vector<float> out = largest_channels(shape_, values, chosen);
  for (size_t i = 0; i < out.size(); ++i) {
    if (shape_.head_learns(int64_t(i) / shape_.dim_k)) out[i] *= options_.keep_scales ? values[i] : 1.0f;
  }
  if (counts != nullptr) *counts = chosen;
  return out;
}

Trainer::Student Trainer::student_of(const std::vector<float>& values) const {
  Student s;
  if (options_.learned == Learned::kGates) {
    s.values = values;
    return s;
  }
  const int64_t dim = shape_.dim_k;
  s.values.assign(size_t(shape_.heads() * dim * dim), 0.0f);
  if (options_.learned == Learned::kChannels) {
    const std::vector<float> alpha = effective_alpha(values, &s.counts);
    for (size_t i = 0; i < alpha.size(); ++i) {
      const int64_t head = int64_t(i) / dim, c = int64_t(i) % dim;
      s.values[size_t((head * dim + c) * dim + c)] = alpha[i];
    }
  } else {
    s.counts = state_.frozen;
    const float* at = values.data();
    for (int64_t h = 0; h < shape_.heads(); ++h) {
      const int64_t n = s.counts[size_t(h)];
      mix_of_directions(at, at + n * dim, n, dim, s.values.data() + h * dim * dim);
      at += 2 * n * dim;
    }
  }
  if (state_.stage == 2 && (options_.frozen_counts() || options_.removed)) {
    s.heads.resize(size_t(shape_.heads()));
    for (int64_t h = 0; h < shape_.heads(); ++h) {
      OldHead& head = s.heads[size_t(h)];
      if (options_.frozen_counts()) {
        head = state_.heads[size_t(h)];
      } else {
        head.as = *options_.removed;
      }
      head.removed = shape_.head_learns(h) && s.counts[size_t(h)] == 0;
    }
  }
  return s;
}

void Trainer::gradient_of_values(const std::vector<float>& dmask, std::vector<float>& gradient) const {
  const int64_t dim = shape_.dim_k;
  gradient.assign(state_.values.size(), 0.0f);
  if (options_.learned == Learned::kGates) {
    gradient = dmask;
  } else if (options_.learned == Learned::kChannels) {
    for (size_t i = 0; i < gradient.size(); ++i) {
      const int64_t head = int64_t(i) / dim, c = int64_t(i) % dim;
      gradient[i] = dmask[size_t((head * dim + c) * dim + c)];
    }
  } else {
    std::vector<int64_t> begin(size_t(shape_.heads()), 0);
    for (size_t h = 1; h < begin.size(); ++h) begin[h] = begin[h - 1] + 2 * state_.frozen[h - 1] * dim;
    pool_.run(shape_.heads(), [&](int64_t h, int) {
      const int64_t n = state_.frozen[size_t(h)], at = begin[size_t(h)];
      const float* values = state_.values.data() + at;
      directions_backward(values, values + n * dim, n, dim, dmask.data() + h * dim * dim, gradient.data() + at,
                          gradient.data() + at + n * dim);
    });
  }
}

void Trainer::adam(const std::vector<float>& gradient, double rate) {
  const double step = double(state_.step + 1);
  const double scale1 = 1.0 / (1.0 - std::pow(kBeta1, step)), scale2 = 1.0 / (1.0 - std::pow(kBeta2, step));
  const auto move_values = [&](size_t begin, size_t end, double rate_here, double low, double high) {
    for (size_t i = begin; i < end; ++i) {
      const double g = gradient[i];
      state_.first[i] = float(kBeta1 * state_.first[i] + (1 - kBeta1) * g);
      state_.second[i] = float(kBeta2 * state_.second[i] + (1 - kBeta2) * g * g);
      const double move = rate_here * state_.first[i] * scale1 / (std::sqrt(state_.second[i] * scale2) + kEpsilon);
      state_.values[i] = float(std::clamp(double(state_.values[i]) - move, low, high));
    }
  };
  if (options_.learned != Learned::kDirections) {
    const bool free = state_.stage == 2 && options_.frozen_counts() && options_.keep_scales;
    return move_values(0, gradient.size(), rate, 0.0, free ? kMostScale : 1.0);
  }
  // The queries' and the keys' directions of a head, each by its own size.
  size_t at = 0;
  for (int64_t n : state_.frozen) {
    for (int part = 0; part < 2 && n > 0; ++part) {
      const size_t end = at + size_t(n * shape_.dim_k);
      double squares = 0;
      for (size_t i = at; i < end; ++i) squares += double(state_.values[i]) * state_.values[i];
      move_values(at, end, rate * std::sqrt(squares / double(end - at)), -1e30, 1e30);
      at = end;
    }
  }
}

double Trainer::mean_share(const ChannelCounts& counts) const {
  if (!counts.empty()) return share_kept(shape_, counts);
  const int64_t per_layer = int64_t(state_.values.size()) / shape_.layers;
  double sum = 0;
  int64_t learned = 0;
  for (size_t k = 0; k < state_.values.size(); ++k) {
    if (!shape_.learns[k / size_t(per_layer)]) continue;
    sum += state_.values[k];
    ++learned;
  }
  return sum / double(learned);
}

LeankMask Trainer::mask_of_values(const std::vector<float>& values, ChannelCounts& counts) const {
  const int64_t dim = shape_.dim_k;
  LeankMask mask;
  if (options_.learned == Learned::kChannels) {
    mask = mask_of_factors(effective_alpha(values, &counts), dim);
  } else {
    counts = state_.frozen;
    mask = mask_of_factors(std::vector<float>(size_t(shape_.heads() * dim), 1.0f), dim);
    const float* at = values.data();
    for (int64_t h = 0; h < shape_.heads(); ++h) {
      if (!shape_.head_learns(h)) continue;
      const int64_t n = counts[size_t(h)];
      HeadMask& head = mask.heads[size_t(h)];
      head.channels.clear();
      head.queries.assign(at, at + n * dim);
      head.keys.assign(at + n * dim, at + 2 * n * dim);
      at += 2 * n * dim;
    }
  }
  for (int64_t h = 0; h < shape_.heads(); ++h) {
    HeadMask& head = mask.heads[size_t(h)];
    if (options_.frozen_counts() && !state_.heads.empty()) {
      head.removed = state_.heads[size_t(h)].as;
      head.score = state_.heads[size_t(h)].score;
    } else {
      // What a mix of nothing is.
      head.removed = options_.removed.value_or(options_.compensate ? RemovedAs::kMean : RemovedAs::kConstant);
    }
  }
  mask.sink = options_.sink;
  mask.window = options_.window;
  mask.compensate = options_.compensate;
  mask.model = model_identity(model_->config());
  return mask;
}

}  // namespace longkv
