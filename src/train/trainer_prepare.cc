// What the second stage begins with: which channels or directions matter most, how many each head keeps, and what
// stands for heads that keep none.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "base/gemm.h"
#include "base/log.h"
#include "train/trainer.h"

namespace longkv {

namespace {

constexpr int64_t kQuadraticRows = 8;     // of a question
constexpr int64_t kPrepareQuestions = 4;  // of each kind, over its documents
constexpr double kRidge = 0.05;           // best_directions
constexpr int kQuadraticRounds = 4;
constexpr float kHighestDropped = 0.75f;

std::vector<int64_t> answer_rows(const Question& question, int64_t most) {
  const int64_t n = int64_t(question.ids.size()) - 1 - question.loss_from, taken = std::min(most, n);
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < taken; ++r) rows.push_back(question.loss_from + r * n / taken);
  return rows;
}

size_t few_questions(const TrainOptions& o) { return size_t(std::max<int64_t>(1, kPrepareQuestions / o.documents)); }

// Mean square of the residual stream: what a layer's loss is relative to.
double mean_square(const std::vector<float>& x) {
  double sum = 0;
  for (float v : x) sum += double(v) * v;
  return sum / double(x.size());
}

// What makes squares of what attention's output lacks relative to the residual stream. Where that output is normalised
// before it is added, what it lacks is scaled with it.
double output_weight(const LayerWeights& layer, const LayerTape& tape) {
  const double relative = 1.0 / mean_square(tape.mid);
  if (layer.post_attn_norm.empty()) return relative;
  return relative * mean_square(layer.post_attn_norm) / mean_square(tape.projected);
}

}  // namespace

// The first `most` questions of every document that is learned from.
Status Trainer::each_question(const std::atomic<bool>* cancel, size_t most,
                              const std::function<Status(const Reading&, const Question&)>& visit) const {
  for (const Reading& reading : readings_) {
    for (size_t i = 0; i < std::min(most, reading.lesson.questions.size()); ++i) {
      if (cancel != nullptr && cancel->load()) return fail(Code::kCancelled, "stopped before the second stage");
      LONGKV_TRY(visit(reading, reading.lesson.questions[i]));
    }
  }
  return {};
}

// The channels of every head in the order they go. A quarter goes at a time; then the quadratic is taken again at the
// mask reached.
Result<std::vector<std::vector<int>>> Trainer::elimination_orders(const std::atomic<bool>* cancel) {
  const auto dim = size_t(shape_.dim_k);
  std::vector<std::vector<bool>> kept(size_t(shape_.heads()), std::vector<bool>(dim, true));
  std::vector<std::vector<int>> orders(size_t(shape_.heads()));
  const size_t few = few_questions(options_);
  for (int round = 0; round < kQuadraticRounds; ++round) {
    std::vector<ChannelQuadratic> quadratics(
        size_t(shape_.heads()), ChannelQuadratic{std::vector<double>(dim * dim), std::vector<double>(dim), 0.0});
    std::vector<float> mask;
    for (const std::vector<bool>& head : kept) mask.insert(mask.end(), head.begin(), head.end());
    LONGKV_TRY(each_question(cancel, few, [&](const Reading& reading, const Question& question) {
      return add_quadratics(reading, question, mask, quadratics);
    }));
    for (int64_t head = 0; head < shape_.heads(); ++head) {
      if (!shape_.head_learns(head)) continue;
      const int64_t end = shape_.dim_k * (round + 1) / kQuadraticRounds;
      eliminate_channels(quadratics[size_t(head)], end - int64_t(orders[size_t(head)].size()), kept[size_t(head)],
                         orders[size_t(head)]);
    }
  }
  return orders;
}

// One question's part of the quadratics, relative to the residual stream. Every layer is given the teacher's input.
Status Trainer::add_quadratics(const Reading& reading, const Question& question, const std::vector<float>& mask,
                               std::vector<ChannelQuadratic>& quadratics) {
  const ModelConfig& c = model_->config();
  const ChunkPrompt prompt = prompt_of(reading, question);
  LONGKV_TRY(chunks_->forward(prompt, question.ids, {}, teacher_));
  const std::vector<int64_t> rows = answer_rows(question, kQuadraticRows);
  const int64_t dim = shape_.dim_k, side = dim + 1;
  std::vector<float> mixes(size_t(shape_.heads() * dim * dim), 0.0f), out, lse;
  std::vector<double> grams(size_t(c.kv_heads * side * side));
  for (size_t i = 0; i < mask.size(); ++i) mixes[i * size_t(dim) + i % size_t(dim)] = mask[i];
  OldMask student;
  student.kind = OldRows::kMixed;
  student.values = mixes.data();
  student.compensate = options_.compensate;
  for (int layer = 0; layer < c.layers; ++layer) {
    if (!chunks_->learns(layer)) continue;
    const LayerTape& tape = teacher_.layers[size_t(layer)];
    const ChunkAttention a = chunks_->attention_of(layer, prompt, student, tape, teacher_.tokens);
    out.resize(tape.attended.size());
    lse.resize(tape.lse.size());
    LONGKV_TRY(chunks_->ops().attend(a, out.data(), lse.data()));
    ChannelGramInputs inputs{mask.data() + layer * c.kv_heads * dim,     out.data(), lse.data(), tape.attended.data(),
                             &model_->weights().layers[size_t(layer)].o, rows};
    LONGKV_TRY(chunks_->ops().channel_grams(a, inputs, grams.data()));
    const double weight =
        output_weight(model_->weights().layers[size_t(layer)], tape) / (double(rows.size()) * double(c.dim));
    for (int h = 0; h < c.kv_heads; ++h) {
      add_channel_gram(grams.data() + h * side * side, weight, quadratics[size_t(layer * c.kv_heads + h)]);
    }
  }
  return {};
}

// A moment averaged over positions up to the model's context. Shifting queries and keys alike changes no score, so all
// of them are as true as those that were read; without, directions would fit the angles that RoPE gives to these
// documents' length.
void Trainer::spread_over_positions(int layer, std::vector<double>& moment) const {
  constexpr int kShifts = 32;
  constexpr double kGolden = 0.6180339887498949;  // steps that meet no frequency's period
  const int64_t dim = shape_.dim_k;
  const std::vector<float> start(moment.begin(), moment.end());
  std::vector<float> moved, flipped(start.size());
  std::fill(moment.begin(), moment.end(), 0.0);
  for (int i = 0; i < kShifts; ++i) {
    const double distance = std::floor(double(model_->config().context) * std::fmod(double(i) * kGolden, 1.0));
    moved = start;
    chunks_->move(layer, distance, moved.data(), dim);
    transpose(moved.data(), dim, dim, dim, flipped.data(), dim);
    chunks_->move(layer, distance, flipped.data(), dim);
    for (size_t k = 0; k < moment.size(); ++k) moment[k] += double(flipped[k]) / kShifts;
  }
}

Result<std::vector<Directions>> Trainer::find_directions(const std::atomic<bool>* cancel) {
  const ModelConfig& c = model_->config();
  std::vector<HeadMoments> moments(size_t(shape_.heads()));
  // Of all questions: those that curves are measured on are a few of them.
  LONGKV_TRY(each_question(cancel, SIZE_MAX, [&](const Reading& reading, const Question& question) -> Status {
    const ChunkPrompt prompt = prompt_of(reading, question);
    LONGKV_TRY(chunks_->forward(prompt, question.ids, {}, teacher_));
    for (int layer = 0; layer < c.layers; ++layer) {
      if (!chunks_->learns(layer)) continue;
      ChunkAttention a = chunks_->attention_of(layer, prompt, {}, teacher_.layers[size_t(layer)], teacher_.tokens);
      a.middle = prompt.middle;
      const bool first = &question == reading.lesson.questions.data();  // a document's keys count once
      add_moments(a, answer_rows(question, teacher_.tokens), first, moments.data() + layer * c.kv_heads, pool_);
    }
    return {};
  }));
  std::vector<Directions> out(moments.size());
  pool_.run(shape_.heads(), [&](int64_t h, int) {
    if (!shape_.head_learns(h)) return;
    HeadMoments& head = moments[size_t(h)];
    spread_over_positions(int(h / shape_.kv_heads), head.queries);
    spread_over_positions(int(h / shape_.kv_heads), head.keys);
    out[size_t(h)] = best_directions(head, shape_.dim_k, kRidge);
  });
  return out;
}

// mixes[i]: of all heads, when each keeps i * align channels or directions; i from 1 to one below all. What stands for
// heads that keep nothing is chosen on the way.
Result<Trainer::Curves> Trainer::measure_curves(const std::vector<std::vector<float>>& mixes,
                                                const std::atomic<bool>* cancel) {
  const ModelConfig& c = model_->config();
  const int64_t levels = shape_.dim_k / options_.align + 1, heads = c.kv_heads;
  // A constant learned on some texts overestimates old rows on others: it is taken on demand alone.
  const std::vector<RemovedAs> ways =
      options_.removed ? std::vector{*options_.removed} : std::vector{RemovedAs::kMean, RemovedAs::kDrop};
  // Tries of a layer: levels 1 and up, then a head without channels in each way. The constant is the mean score of old
  // rows together: the log of their softmax weight over their number.
  std::vector<std::vector<double>> losses(size_t(levels - 1) - 1 + ways.size(),
                                          std::vector<double>(size_t(shape_.heads()), 0.0));
  std::vector<double> score_sum(size_t(shape_.heads()), 0.0);
  double score_rows = 0;
  std::vector<float> out, lse;
  const size_t few = few_questions(options_);
  for (int pass = 0; pass < 2; ++pass) {
    LONGKV_TRY(each_question(cancel, few, [&](const Reading& reading, const Question& question) -> Status {
      const ChunkPrompt prompt = prompt_of(reading, question);
      LONGKV_TRY(chunks_->forward(prompt, question.ids, {}, teacher_));
      const std::vector<int64_t> rows = answer_rows(question, teacher_.tokens);
      if (pass == 0) score_rows += double(rows.size());
      for (int layer = 0; layer < c.layers; ++layer) {
        if (!chunks_->learns(layer)) continue;
        const LayerTape& tape = teacher_.layers[size_t(layer)];
        out.resize(tape.attended.size());
        lse.resize(tape.lse.size());
        const auto attention = [&](const OldMask& mask) {
          return chunks_->attention_of(layer, prompt, mask, tape, teacher_.tokens);
        };
        if (pass == 0) {
          OldMask without;
          without.kind = OldRows::kGates;
          const ChunkAttention a = attention(without);
          LONGKV_TRY(chunks_->ops().attend(a, out.data(), lse.data()));
          for (int64_t t : rows) {
            for (int64_t g = 0; g < heads * a.group; ++g) {
              const auto at = size_t(t * heads * a.group + g);
              const double share = std::max(1e-6, 1.0 - std::exp(double(lse[at]) - tape.lse[at]));
              score_sum[size_t(layer * heads + g / a.group)] +=
                  (tape.lse[at] + std::log(share) - std::log(double(count_of(prompt.middle)))) / a.group;
            }
          }
          continue;
        }
        for (size_t tried = 0; tried < losses.size(); ++tried) {
          std::vector<OldHead> removed(size_t(shape_.heads()));
          OldMask mask;
          mask.kind = OldRows::kMixed;
          mask.compensate = options_.compensate;
          if (int64_t(tried) + 2 < levels) {
            mask.values = mixes[tried + 1].data();
          } else {
            mask.values = mixes[0].data();  // not looked at
            for (size_t h = 0; h < removed.size(); ++h) {
              removed[h] = {true, ways[tried + 2 - size_t(levels)], float(score_sum[h] / score_rows)};
            }
            mask.heads = removed;
          }
          const ChunkAttention a = attention(mask);
          LONGKV_TRY(chunks_->ops().attend(a, out.data(), lse.data()));
          const double weight =
              output_weight(model_->weights().layers[size_t(layer)], tape) / (double(rows.size()) * double(c.dim));
          LONGKV_TRY(add_output_losses(a, out.data(), tape.attended.data(), model_->weights().layers[size_t(layer)].o,
                                       rows, weight, losses[tried].data() + layer * heads, chunks_->ops()));
        }
      }
      return {};
    }));
  }
  Curves curves(size_t(shape_.heads() * levels), 0.0);
  state_.heads.assign(size_t(shape_.heads()), {});
  for (int64_t h = 0; h < shape_.heads(); ++h) {
    if (!shape_.head_learns(h)) continue;
    double* curve = curves.data() + h * levels;
    curve[0] = INFINITY;
    for (size_t w = 0; w < ways.size(); ++w) {
      const double loss = losses[size_t(levels) - 2 + w][size_t(h)];
      if (!(loss < curve[0])) continue;
      curve[0] = loss;
      state_.heads[size_t(h)] = {false, ways[w], float(score_sum[size_t(h)] / score_rows)};
    }
    for (int64_t i = 1; i + 1 < levels; ++i) curve[i] = losses[size_t(i - 1)][size_t(h)];
  }
  return curves;
}

Status Trainer::prepare_second_stage(const std::atomic<bool>* cancel) {
  if (options_.frozen_counts()) {
    LONGKV_TRY(read_first_documents());
    const int64_t dim = shape_.dim_k, levels = dim / options_.align + 1;
    std::vector<std::vector<float>> mixes(static_cast<size_t>(levels - 1),
                                          std::vector<float>(size_t(shape_.heads() * dim * dim), 0.0f));
    std::vector<std::vector<int>> orders;
    std::vector<Directions> directions;
    if (options_.learned == Learned::kChannels) {
      LONGKV_ASSIGN(orders, elimination_orders(cancel));
    } else {
      LONGKV_ASSIGN(directions, find_directions(cancel));
    }
    for (int64_t level = 1; level + 1 < levels; ++level) {
      const int64_t n = level * options_.align;
      for (int64_t h = 0; h < shape_.heads(); ++h) {
        if (!shape_.head_learns(h)) continue;
        float* mix = mixes[size_t(level)].data() + h * dim * dim;
        if (options_.learned == Learned::kDirections) {
          mix_of_directions(directions[size_t(h)].queries.data(), directions[size_t(h)].keys.data(), n, dim, mix);
        } else {
          for (int64_t i = dim - n; i < dim; ++i) mix[orders[size_t(h)][size_t(i)] * (dim + 1)] = 1.0f;
        }
      }
    }
    LONGKV_ASSIGN(const Curves curves, measure_curves(mixes, cancel));
    MaskShape paid = shape_;
    if (options_.allocation == Allocation::kChannels) paid.dim_v = 0;
    const double left = ((1.0 - options_.ratio) * paid.dim_k + paid.dim_v) / double(paid.dim_k + paid.dim_v);
    const double share = options_.bytes > 0 ? options_.bytes : left;
    for (int64_t h = 0; h < shape_.heads(); ++h) {
      if (shape_.head_streams(h)) state_.heads[size_t(h)] = {false, RemovedAs::kDrop, 0.0f};
    }
    state_.frozen = counts_by_bytes(paid, curves, share, options_.align);
    if (options_.learned == Learned::kDirections) {
      state_.values.clear();
      for (int64_t h = 0; h < shape_.heads(); ++h) {
        const Directions& d = directions[size_t(h)];
        const int64_t n = state_.frozen[size_t(h)] * dim;
        state_.values.insert(state_.values.end(), d.queries.begin(), d.queries.begin() + n);
        state_.values.insert(state_.values.end(), d.keys.begin(), d.keys.begin() + n);
      }
    } else if (options_.steps == 0) {
      // Scales that rank channels as elimination did: kept ones whole, dropped ones below by their order, far enough
      // apart that single steps of refinement do not reshuffle them.
      for (int64_t h = 0; h < shape_.heads(); ++h) {
        const std::vector<int>& order = orders[size_t(h)];
        const auto dropped = int64_t(order.size()) - state_.frozen[size_t(h)];
        for (int64_t i = 0; i < int64_t(order.size()); ++i) {
          state_.values[size_t(h * dim + order[size_t(i)])] =
              i < dropped ? kHighestDropped * float(i + 1) / float(dropped) : 1.0f;
        }
      }
    }
  }
  state_.stage = 2;
  state_.step = 0;
  state_.first.assign(state_.values.size(), 0.0f);
  state_.second.assign(state_.values.size(), 0.0f);
  return {};
}

}  // namespace longkv
