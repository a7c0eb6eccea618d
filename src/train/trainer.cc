#include "train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace longkv {

namespace {

constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8;
constexpr auto kCheckpointEvery = std::chrono::seconds(30);
// Index of the lesson that judges: far from those that are learned from, whose indices count up from 0.
constexpr int64_t kHeldOutIndex = int64_t{12} << 40;  // a multiple of every number of kinds
constexpr int64_t kJudgements = 8;                    // during the last stage
constexpr int64_t kQuadraticRows = 8;                 // of a question
constexpr size_t kQuadraticQuestions = 4;             // of a document
constexpr int kQuadraticRounds = 4;

Status check_options(const TrainOptions& o) {
  const auto positive = [](int64_t n, const char* name) -> Status {
    if (n > 0) return {};
    return fail(Code::kInvalidArgument, "{} must be positive; found {}", name, n);
  };
  LONGKV_TRY(positive(o.lessons.questions, "questions"));
  LONGKV_TRY(positive(o.lengths, "lengths"));
  LONGKV_TRY(positive(o.align, "align"));
  LONGKV_TRY(positive(o.held_out, "held-out questions"));
  if (o.steps < 0 || o.refine_steps < 0) return fail(Code::kInvalidArgument, "steps must not be negative");
  if (o.sink < 0 || o.window < 0) return fail(Code::kInvalidArgument, "sink and window must not be negative");
  if (!(o.ratio >= 0 && o.ratio < 1)) return fail(Code::kInvalidArgument, "ratio must be in [0, 1); found {}", o.ratio);
  if (o.kind == OldRows::kChannels && o.steps == 0 && !o.by_bytes) {
    return fail(Code::kInvalidArgument, "allocation by threshold needs scales that a first stage has learned: steps=0");
  }
  if (!(o.rate > 0 && o.refine_rate > 0 && o.lambda >= 0)) {
    return fail(Code::kInvalidArgument, "rates must be positive and lambda not negative");
  }
  const int64_t least = o.sink + o.window + RegionStore::kStep;
  if (o.shortest < least || o.longest < o.shortest) {
    return fail(
        Code::kInvalidArgument,
        "documents of {} to {} tokens: the shortest must hold {} first rows, {} recent ones and {} old ones, and "
        "must not exceed the longest; lower sink or window, or take longer documents",
        o.shortest, o.longest, o.sink, o.window, RegionStore::kStep);
  }
  return {};
}

}  // namespace

Trainer::Trainer(std::shared_ptr<const LoadedModel> model, const Tokenizer& tokenizer, const TrainOptions& options,
                 ThreadPool& pool)
    : model_(std::move(model)), tokenizer_(tokenizer), options_(options), pool_(pool) {}

Result<std::unique_ptr<Trainer>> Trainer::create(std::shared_ptr<const LoadedModel> model, const Tokenizer& tokenizer,
                                                 const TrainOptions& options, ThreadPool& pool) {
  LONGKV_TRY(check_options(options));
  std::unique_ptr<Trainer> t(new Trainer(model, tokenizer, options, pool));
  const ModelConfig& c = model->config();
  const int64_t context = options.longest + options.lessons.max_chunk;
  LONGKV_ASSIGN(t->chunks_, ChunkModel::create(model, context, pool));
  t->shape_ = {c.layers, c.kv_heads, c.head_dim_k, c.head_dim_v, {}};
  for (int layer = 0; layer < c.layers; ++layer) t->shape_.learns.push_back(t->chunks_->learns(layer));
  if (t->shape_.learned_heads() == 0) {
    return fail(Code::kUnsupported, "all layers of {} see a sliding window only: there are no old rows to learn about",
                c.family);
  }
  if (options.kind == OldRows::kChannels && c.head_dim_k % options.align != 0) {
    return fail(Code::kInvalidArgument, "align={} does not divide the {} channels of a head", options.align,
                c.head_dim_k);
  }
  t->readings_.resize(size_t(lesson_kinds(options.lessons)));
  t->held_out_.resize(t->readings_.size());
  const size_t values = size_t(c.layers * t->chunks_->values_per_layer(options.kind));
  t->state_.values.assign(values, 1.0f);
  t->state_.first.assign(values, 0.0f);
  t->state_.second.assign(values, 0.0f);
  return t;
}

RowRange Trainer::middle_of(int64_t document) const {
  const int64_t old = document - options_.sink - options_.window;
  const int64_t end = options_.sink + (old > 0 ? old / RegionStore::kStep * RegionStore::kStep : 0);
  return {options_.sink, end};
}

// Lengths evenly spaced over the range, in an order drawn anew for every pass over them.
int64_t Trainer::length_of(int64_t document) const {
  std::vector<int64_t> order(size_t(options_.lengths));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 rng(options_.lessons.seed * 7919 + uint64_t(document / options_.lengths));
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(rng() % i)]);
  const int64_t at = order[size_t(document % options_.lengths)];
  return options_.lengths == 1
             ? options_.longest
             : options_.shortest + (options_.longest - options_.shortest) * at / (options_.lengths - 1);
}

Result<Trainer::Reading> Trainer::new_reading() const {
  SessionOptions options;
  options.context = options_.longest + options_.lessons.max_chunk;
  LONGKV_ASSIGN(options.recipe, parse_recipe("store=f32"));
  Reading reading;
  LONGKV_ASSIGN(reading.session, Session::create(model_, options, pool_));
  return reading;
}

Status Trainer::read(Reading& reading, const LessonOptions& options, int64_t index, int64_t tokens) {
  if (index == reading.index) return {};
  if (!reading.session) {
    LONGKV_ASSIGN(reading, new_reading());
  }
  reading.index = -1;
  reading.teacher.clear();
  LONGKV_ASSIGN(reading.lesson, make_lesson(tokenizer_, options, uint64_t(index), tokens));
  LONGKV_TRY(reading.session->truncate(0));
  LONGKV_TRY(reading.session->prefill(reading.lesson.document));
  reading.teacher.resize(reading.lesson.questions.size());
  reading.index = index;
  return {};
}

// What the student sees: for channels in the second stage, alpha where the mask keeps it.
std::vector<float> Trainer::effective(const std::vector<float>& values, ChannelCounts* counts) const {
  if (options_.kind != OldRows::kChannels || state_.stage < 2) return values;
  const ChannelCounts chosen =
      options_.by_bytes ? state_.frozen : counts_by_threshold(shape_, values, options_.ratio, options_.align);
  std::vector<float> out = largest_channels(shape_, values, chosen);
  for (size_t i = 0; i < out.size(); ++i) {
    if (shape_.head_learns(int64_t(i) / shape_.dim_k)) out[i] *= options_.keep_scales ? values[i] : 1.0f;
  }
  if (counts != nullptr) *counts = chosen;
  return out;
}

Result<double> Trainer::question_loss(Reading& reading, size_t asked, const std::vector<float>& values,
                                      std::vector<float>* gradient) {
  const Question& question = reading.lesson.questions[asked];
  const KvCache& cache = reading.session->kv().cache();
  const RowRange middle = middle_of(reading.session->tokens());
  std::vector<float>& teacher = reading.teacher[asked];
  if (teacher.empty() || options_.kind == OldRows::kGates) {
    LONGKV_TRY(chunks_->forward(cache, middle, question.ids, OldRows::kDense, nullptr, nullptr, teacher_));
    teacher = teacher_.final;
  }
  LONGKV_TRY(chunks_->forward(cache, middle, question.ids, options_.kind, values.data(), &teacher_, student_));
  const int64_t dim = model_->config().dim, end = int64_t(question.ids.size()) - 1;
  std::vector<float> d(student_.final.size(), 0.0f);
  double squares = 0, lost = 0;
  for (int64_t i = question.loss_from * dim; i < end * dim; ++i) {
    const double wanted = teacher[size_t(i)], away = double(student_.final[size_t(i)]) - wanted;
    squares += wanted * wanted;
    lost += away * away;
    d[size_t(i)] = float(away);
  }
  const double loss = lost / squares;
  if (!std::isfinite(loss)) {
    return fail(Code::kInternal, "the loss is not a number (document {}, kind {}): lower the rate", reading.index,
                reading.lesson.kind);
  }
  if (gradient != nullptr) {
    for (float& x : d) x *= float(2.0 / squares);
    gradient->assign(values.size(), 0.0f);
    chunks_->backward(cache, middle, options_.kind, values.data(), &teacher_, student_, d.data(), gradient->data());
  }
  return loss;
}

void Trainer::adam(const std::vector<float>& gradient, double rate) {
  const double step = double(state_.step + 1);
  const double scale1 = 1.0 / (1.0 - std::pow(kBeta1, step)), scale2 = 1.0 / (1.0 - std::pow(kBeta2, step));
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double g = gradient[i];
    state_.first[i] = float(kBeta1 * state_.first[i] + (1 - kBeta1) * g);
    state_.second[i] = float(kBeta2 * state_.second[i] + (1 - kBeta2) * g * g);
    const double move = rate * state_.first[i] * scale1 / (std::sqrt(state_.second[i] * scale2) + kEpsilon);
    state_.values[i] = float(std::clamp(double(state_.values[i]) - move, 0.0, 1.0));
  }
}

// Loss on the held-out questions; the best values so far are kept.
Status Trainer::judge() {
  LessonOptions options = options_.lessons;
  options.questions = options_.held_out;
  const std::vector<float> values = effective(state_.values, nullptr);
  double sum = 0;
  for (size_t kind = 0; kind < held_out_.size(); ++kind) {
    Reading& reading = held_out_[kind];
    LONGKV_TRY(read(reading, options, kHeldOutIndex + int64_t(kind), options_.longest));
    const double share = 1.0 / double(held_out_.size() * reading.lesson.questions.size());
    for (size_t asked = 0; asked < reading.lesson.questions.size(); ++asked) {
      LONGKV_ASSIGN(const double loss, question_loss(reading, asked, values, nullptr));
      sum += loss * share;
    }
  }
  if (state_.best_values.empty() || sum < state_.best) {
    if (state_.best_values.empty()) state_.held_out_start = sum;
    state_.best = sum;
    state_.best_values = state_.values;
  }
  return {};
}

// By head, what keeping i * align channels loses: [heads][dim_k / align + 1], and the channels in the order they go. A
// quarter of them goes at a time; then the quadratic is taken again at the mask reached.
Result<std::vector<double>> Trainer::channel_losses(std::vector<std::vector<int>>& orders,
                                                    const std::atomic<bool>* cancel) {
  const ModelConfig& c = model_->config();
  const auto dim = size_t(c.head_dim_k);
  const int64_t levels = c.head_dim_k / options_.align + 1;
  std::vector<std::vector<bool>> kept(size_t(shape_.heads()), std::vector<bool>(dim, true));
  std::vector<double> losses(size_t(shape_.heads() * levels), 0.0);
  orders.assign(size_t(shape_.heads()), {});
  for (size_t kind = 0; kind < readings_.size(); ++kind) {
    if (readings_[kind].index >= 0) continue;
    LONGKV_TRY(read(readings_[kind], options_.lessons, int64_t(kind), length_of(int64_t(kind))));
  }
  for (int round = 0; round < kQuadraticRounds; ++round) {
    std::vector<ChannelQuadratic> quadratics(
        size_t(shape_.heads()), ChannelQuadratic{std::vector<double>(dim * dim), std::vector<double>(dim), 0.0});
    std::vector<float> mask;
    for (const std::vector<bool>& head : kept) mask.insert(mask.end(), head.begin(), head.end());
    for (Reading& reading : readings_) {
      for (size_t i = 0; i < std::min(kQuadraticQuestions, reading.lesson.questions.size()); ++i) {
        if (cancel != nullptr && cancel->load()) return fail(Code::kCancelled, "stopped");
        LONGKV_TRY(add_quadratics(reading, reading.lesson.questions[i], mask, quadratics));
      }
    }
    for (int64_t head = 0; head < shape_.heads(); ++head) {
      if (!shape_.head_learns(head)) continue;
      const int64_t end = c.head_dim_k * (round + 1) / kQuadraticRounds;
      eliminate_channels(quadratics[size_t(head)], end - int64_t(orders[size_t(head)].size()), options_.align,
                         kept[size_t(head)], orders[size_t(head)], losses.data() + head * levels);
    }
  }
  return losses;
}

// One question's part of the quadratics, relative to the residual stream. Every layer is given the teacher's input.
Status Trainer::add_quadratics(const Reading& reading, const Question& question, const std::vector<float>& mask,
                               std::vector<ChannelQuadratic>& quadratics) {
  const ModelConfig& c = model_->config();
  const KvCache& cache = reading.session->kv().cache();
  const RowRange middle = middle_of(reading.session->tokens());
  LONGKV_TRY(chunks_->forward(cache, middle, question.ids, OldRows::kDense, nullptr, nullptr, teacher_));
  const int64_t n = int64_t(question.ids.size()) - 1 - question.loss_from, taken = std::min(kQuadraticRows, n);
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < taken; ++r) rows.push_back(question.loss_from + r * n / taken);
  std::vector<float> out, lse;
  for (int layer = 0; layer < c.layers; ++layer) {
    if (!chunks_->learns(layer)) continue;
    const LayerTape& tape = teacher_.layers[size_t(layer)];
    double rms2 = 0;
    for (float x : tape.mid) rms2 += double(x) * x / double(tape.mid.size());
    const ChunkAttention a = chunks_->masked_attention(layer, cache, middle, mask.data(), tape, teacher_.tokens);
    out.resize(tape.attended.size());
    lse.resize(tape.lse.size());
    attend_chunk(a, out.data(), lse.data(), pool_);
    add_channel_quadratic(a, out.data(), lse.data(), tape.attended.data(), model_->weights().layers[size_t(layer)].o,
                          rows, 1.0 / (double(taken) * double(c.dim) * rms2), quadratics.data() + layer * c.kv_heads,
                          pool_);
  }
  return {};
}

// Scales that rank channels as elimination did: kept ones whole, dropped ones below by their order, far enough apart
// that single steps of refinement do not reshuffle them.
void Trainer::rank_channels(const std::vector<std::vector<int>>& orders, const ChannelCounts& counts) {
  constexpr float kHighestDropped = 0.75f;
  for (int64_t head = 0; head < shape_.heads(); ++head) {
    const std::vector<int>& order = orders[size_t(head)];
    const auto dropped = int64_t(order.size()) - counts[size_t(head)];
    for (int64_t i = 0; i < int64_t(order.size()); ++i) {
      state_.values[size_t(head * shape_.dim_k + order[size_t(i)])] =
          i < dropped ? kHighestDropped * float(i + 1) / float(dropped) : 1.0f;
    }
  }
}

Status Trainer::run_stage(const std::string& checkpoint, const std::function<void(const TrainProgress&)>& progress,
                          const std::atomic<bool>* cancel) {
  const bool refining = state_.stage == 2;
  const int64_t steps = refining ? options_.refine_steps : options_.steps;
  const int64_t judge_every = std::max<int64_t>(1, steps / kJudgements);
  auto saved = std::chrono::steady_clock::now();
  double mean = 0;
  std::vector<float> gradient;
  if (refining) LONGKV_TRY(judge());
  while (state_.step < steps) {
    if (cancel != nullptr && cancel->load()) {
      if (!checkpoint.empty()) LONGKV_TRY(save(checkpoint));
      return fail(Code::kCancelled, "stopped at step {} of {} of stage {}{}", state_.step, steps, state_.stage,
                  checkpoint.empty() ? "; nothing is left of it" : "; run again to go on");
    }
    const int64_t number = state_.step + (refining ? options_.steps : 0);
    const int64_t kinds = int64_t(readings_.size()), kind = number % kinds, round = number / kinds;
    Reading& reading = readings_[size_t(kind)];
    const int64_t document = round / options_.lessons.questions * kinds + kind;
    LONGKV_TRY(read(reading, options_.lessons, document, length_of(document)));
    const auto asked = size_t(round % options_.lessons.questions) % reading.lesson.questions.size();
    ChannelCounts counts;
    const std::vector<float> values = effective(state_.values, &counts);
    const Result<double> loss = question_loss(reading, asked, values, &gradient);
    if (!loss.ok()) {
      if (!checkpoint.empty()) LONGKV_TRY(save(checkpoint));
      return loss.status();
    }
    if (!refining) {
      // Values of layers without old rows mean nothing and stay as they are.
      const int64_t per_layer = int64_t(state_.values.size()) / shape_.layers;
      const auto learned = std::count(shape_.learns.begin(), shape_.learns.end(), true);
      const float push = float(options_.lambda / double(learned * per_layer));
      for (size_t k = 0; k < gradient.size(); ++k) {
        if (shape_.learns[k / size_t(per_layer)]) gradient[k] += push;
      }
    }
    const double i = double(state_.step), fifth = std::max(1.0, double(steps) / 5);
    const double ramp = std::min({1.0, std::max((i + 1) / fifth, 0.1), std::max((double(steps) - i) / fifth, 0.1)});
    adam(gradient, ramp * (refining ? options_.refine_rate : options_.rate));
    ++state_.step;
    mean = state_.step == 1 ? *loss : 0.9 * mean + 0.1 * *loss;
    if (refining && (state_.step % judge_every == 0 || state_.step == steps)) LONGKV_TRY(judge());
    if (progress) {
      double share = 0;
      if (refining) {
        share = share_kept(shape_, counts);
      } else {
        const int64_t per_layer = int64_t(state_.values.size()) / shape_.layers;
        int64_t learned = 0;
        for (size_t k = 0; k < state_.values.size(); ++k) {
          if (!shape_.learns[k / size_t(per_layer)]) continue;
          share += state_.values[k];
          ++learned;
        }
        share /= double(learned);
      }
      progress({state_.stage, state_.step, steps, mean, share, reading.lesson.kind});
    }
    if (!checkpoint.empty() && std::chrono::steady_clock::now() - saved > kCheckpointEvery) {
      LONGKV_TRY(save(checkpoint));
      saved = std::chrono::steady_clock::now();
    }
  }
  return {};
}

Result<TrainResult> Trainer::run(const std::string& checkpoint,
                                 const std::function<void(const TrainProgress&)>& progress,
                                 const std::atomic<bool>* cancel) {
  if (!checkpoint.empty()) LONGKV_TRY(load(checkpoint));
  if (state_.stage == 1) {
    LONGKV_TRY(run_stage(checkpoint, progress, cancel));
    if (options_.kind == OldRows::kChannels) {
      if (options_.by_bytes) {
        std::vector<std::vector<int>> orders;
        LONGKV_ASSIGN(const std::vector<double> losses, channel_losses(orders, cancel));
        // The bytes that dropping `ratio` of the channels of every head alike would leave.
        const double share =
            ((1.0 - options_.ratio) * shape_.dim_k + shape_.dim_v) / double(shape_.dim_k + shape_.dim_v);
        state_.frozen = counts_by_bytes(shape_, losses, share, options_.align);
        if (options_.steps == 0) rank_channels(orders, state_.frozen);
      }
      state_.stage = 2;
      state_.step = 0;
      std::fill(state_.first.begin(), state_.first.end(), 0.0f);
      std::fill(state_.second.begin(), state_.second.end(), 0.0f);
      if (!checkpoint.empty()) LONGKV_TRY(save(checkpoint));
    }
  }
  if (state_.stage == 2) LONGKV_TRY(run_stage(checkpoint, progress, cancel));
  // Gates rank heads; all of them open lose nothing, so the loss cannot choose among states.
  if (options_.kind == OldRows::kGates) LONGKV_TRY(judge());
  if (!checkpoint.empty()) LONGKV_TRY(save(checkpoint));
  TrainResult result;
  result.values = effective(state_.best_values, &result.counts);
  result.held_out_start = state_.held_out_start;
  result.held_out = state_.best;
  return result;
}

}  // namespace longkv
