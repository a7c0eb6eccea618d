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
#include "cuda/card_chunk_ops.h"

namespace longkv {

namespace {

constexpr auto kCheckpointEvery = std::chrono::seconds(30);
// Index of the lesson that judges: far from those that are learned from, whose indices count up from 0.
constexpr int64_t kHeldOutIndex = int64_t{12} << 40;  // a multiple of every number of kinds
constexpr int64_t kJudgements = 4;                    // during the last stage

Status check_options(const TrainOptions& o) {
  const auto positive = [](int64_t n, const char* name) -> Status {
    if (n > 0) return {};
    return fail(Code::kInvalidArgument, "{} must be positive; found {}", name, n);
  };
  LONGKV_TRY(positive(o.lessons.questions, "questions"));
  LONGKV_TRY(positive(o.lengths, "lengths"));
  LONGKV_TRY(positive(o.align, "align"));
  LONGKV_TRY(positive(o.held_out, "held-out questions"));
  LONGKV_TRY(positive(o.documents, "documents"));
  if (o.steps < 0 || o.refine_steps < 0) return fail(Code::kInvalidArgument, "steps must not be negative");
  if (o.sink < 0 || o.window < 0) return fail(Code::kInvalidArgument, "sink and window must not be negative");
  if (!(o.ratio >= 0 && o.ratio < 1)) return fail(Code::kInvalidArgument, "ratio must be in [0, 1); found {}", o.ratio);
  if (!(o.bytes >= 0 && o.bytes <= 1) || (o.bytes > 0 && o.allocation != Allocation::kBytes)) {
    return fail(Code::kInvalidArgument, "bytes must be in [0, 1] and need allocation by bytes; found {}", o.bytes);
  }
  if (o.learned == Learned::kChannels && o.steps == 0 && !o.frozen_counts()) {
    return fail(Code::kInvalidArgument, "allocation by threshold needs scales that a first stage has learned: steps=0");
  }
  if (o.learned == Learned::kDirections && (o.steps > 0 || !o.frozen_counts())) {
    return fail(Code::kInvalidArgument, "directions have no first stage and are allocated by bytes; found steps={}{}",
                o.steps, o.frozen_counts() ? "" : ", allocation by threshold");
  }
  if (lesson_kinds(o.lessons) == 0) {
    return fail(Code::kInvalidArgument, "without generated texts some of your own are needed");
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

Result<std::unique_ptr<Trainer>> Trainer::create(const std::shared_ptr<const LoadedModel>& model,
                                                 const Tokenizer& tokenizer, const TrainOptions& options,
                                                 ThreadPool& pool, const std::shared_ptr<CardModel>& card,
                                                 int64_t card_chunk) {
  LONGKV_TRY(check_options(options));
  std::unique_ptr<Trainer> t(new Trainer(model, tokenizer, options, pool));
  const ModelConfig& c = model->config();
  const int64_t context = options.longest + options.lessons.max_chunk;
  LONGKV_TRY(t->open_reader(card, card_chunk));  // takes its memory of a card first
  std::unique_ptr<ChunkOps> ops;
  if (card) {
    LONGKV_ASSIGN(ops, make_card_chunk_ops(card, pool));
  }
  LONGKV_ASSIGN(t->chunks_, ChunkModel::create(model, context, pool, std::move(ops)));
  t->shape_ = {c.layers, c.kv_heads, c.head_dim_k, c.head_dim_v, {}, options.streaming};
  for (int layer = 0; layer < c.layers; ++layer) t->shape_.learns.push_back(t->chunks_->learns(layer));
  if (!options.streaming.empty() && (int64_t(options.streaming.size()) != t->shape_.heads() ||
                                     !options.frozen_counts() || options.learned == Learned::kGates)) {
    return fail(Code::kInvalidArgument, "streaming heads: {} marks for {} heads, and allocation must be by bytes",
                options.streaming.size(), t->shape_.heads());
  }
  if (t->shape_.learned_heads() == 0) {
    return fail(Code::kUnsupported, "all layers of {} see a sliding window only: there are no old rows to learn about",
                c.family);
  }
  if (options.learned != Learned::kGates && c.head_dim_k % options.align != 0) {
    return fail(Code::kInvalidArgument, "align={} does not divide the {} channels of a head", options.align,
                c.head_dim_k);
  }
  t->readings_.resize(size_t(lesson_kinds(options.lessons) * options.documents));
  t->held_out_.resize(t->readings_.size());
  const size_t values = size_t(t->shape_.heads()) * size_t(options.learned == Learned::kChannels ? t->shape_.dim_k : 1);
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

Status Trainer::open_reader(const std::shared_ptr<CardModel>& card, int64_t card_chunk) {
  SessionOptions options;
  options.context = options_.longest + options_.lessons.max_chunk;
  options.window_slack = options_.longest;  // questions are asked from the document's middle on
  options.card = card;
  options.card_kv = options.card_decodes = false;
  options.card_chunk = card_chunk;
  LONGKV_ASSIGN(options.recipe, parse_recipe("store=f32"));
  LONGKV_ASSIGN(reader_, Session::create(model_, options, pool_));
  return {};
}

Status Trainer::read(Reading& reading, const LessonOptions& options, int64_t index, int64_t tokens) {
  if (index == reading.index) return {};
  if (!reading.kv) {
    LONGKV_ASSIGN(reading.kv, reader_->make_kv(reader_->options().recipe));
  }
  reading.index = -1;
  chunks_->ops().forget(reading.id);
  reading.teacher.clear();
  LONGKV_ASSIGN(reading.lesson, make_lesson(tokenizer_, options, uint64_t(index), tokens));
  LONGKV_TRY(reading.kv->truncate(TokenCount{0}));
  LONGKV_TRY(reader_->truncate(0));
  Status done;
  if (reader_->reads_on_card()) {
    // The card fills one cache; others take in what it reads.
    reader_->kv().add_follower(reading.kv.get());
    done = reader_->prefill(reading.lesson.document);
    reader_->kv().clear_followers();
  } else {
    reader_->exchange_kv(reading.kv);
    done = reader_->prefill(reading.lesson.document);
    reader_->exchange_kv(reading.kv);
  }
  LONGKV_TRY(done);
  reading.id = ++documents_read_;
  reading.teacher.resize(reading.lesson.questions.size());
  reading.index = index;
  return {};
}

Status Trainer::read_first_documents() {
  for (size_t i = 0; i < readings_.size(); ++i) {
    if (readings_[i].index >= 0) continue;
    LONGKV_TRY(read(readings_[i], options_.lessons, int64_t(i), length_of(int64_t(i))));
  }
  return {};
}

ChunkPrompt Trainer::prompt_of(const Reading& reading, const Question& question) const {
  return {reading.kv->cache(), question.after, middle_of(question.after), reading.id};
}

Result<double> Trainer::question_loss(Reading& reading, size_t asked, const Student& student,
                                      std::vector<float>* gradient) {
  const Question& question = reading.lesson.questions[asked];
  const ChunkPrompt prompt = prompt_of(reading, question);
  std::vector<float>& teacher = reading.teacher[asked];
  if (teacher.empty() || options_.learned == Learned::kGates) {
    LONGKV_TRY(chunks_->forward(prompt, question.ids, {}, teacher_));
    teacher = teacher_.final;
  }
  const OldMask mask = student.mask(options_, &teacher_);
  LONGKV_TRY(chunks_->forward(prompt, question.ids, mask, student_));
  const int64_t dim = model_->config().dim, end = int64_t(question.ids.size()) - 1;
  std::vector<float> d(student_.final.size(), 0.0f);
  double loss = 0;
  if (options_.loss == TrainLoss::kDivergence) {
    const int64_t at = question.loss_from * dim;
    LONGKV_ASSIGN(loss, chunks_->divergence(teacher.data() + at, student_.final.data() + at, end - question.loss_from,
                                            gradient == nullptr ? nullptr : d.data() + at));
  } else {
    double squares = 0, lost = 0;
    for (int64_t i = question.loss_from * dim; i < end * dim; ++i) {
      const double wanted = teacher[size_t(i)], away = double(student_.final[size_t(i)]) - wanted;
      squares += wanted * wanted;
      lost += away * away;
      d[size_t(i)] = float(away);
    }
    loss = lost / squares;
    for (float& x : d) x *= float(2.0 / squares);
  }
  if (!std::isfinite(loss)) {
    return fail(Code::kInternal,
                "the loss is not a number at step {} of stage {} (document {}, kind {}): lower the rate", state_.step,
                state_.stage, reading.index, reading.lesson.kind);
  }
  if (gradient != nullptr) {
    std::vector<float> dmask(student.values.size(), 0.0f);
    LONGKV_TRY(chunks_->backward(prompt, mask, student_, d.data(), dmask.data()));
    gradient_of_values(dmask, *gradient);
    for (float g : *gradient) {
      if (std::isfinite(g)) continue;
      return fail(Code::kInternal, "the gradient is not a number at step {} of stage {}: lower the rate", state_.step,
                  state_.stage);
    }
  }
  return loss;
}

// Loss on the held-out questions; the best values so far are kept.
Status Trainer::judge() {
  LessonOptions options = options_.lessons;
  options.questions = std::max<int64_t>(1, options_.held_out / options_.documents);
  const Student student = student_of(state_.values);
  double sum = 0;
  for (size_t i = 0; i < held_out_.size(); ++i) {
    Reading& reading = held_out_[i];
    LONGKV_TRY(read(reading, options, kHeldOutIndex + int64_t(i), options_.longest));
    const double share = 1.0 / double(held_out_.size() * reading.lesson.questions.size());
    for (size_t asked = 0; asked < reading.lesson.questions.size(); ++asked) {
      LONGKV_ASSIGN(const double loss, question_loss(reading, asked, student, nullptr));
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

Status Trainer::try_to_save(const std::string& checkpoint) const {
  const Status saved = save(checkpoint);
  if (saved.ok()) return {};
  return notice(fmt::format("the state of the run could not be saved, a stop now would lose it: {}", saved.message()));
}

Status Trainer::run_stage(const std::string& checkpoint, const std::function<void(const TrainProgress&)>& progress,
                          const std::atomic<bool>* cancel) {
  const bool refining = state_.stage == 2;
  const int64_t steps = refining ? options_.refine_steps : options_.steps;
  const int64_t judge_every = std::max<int64_t>(1, steps / kJudgements);
  auto saved = std::chrono::steady_clock::now();
  double mean = 0;
  std::vector<float> gradient;
  State good;  // before the last step
  if (refining) LONGKV_TRY(judge());
  while (state_.step < steps) {
    if (cancel != nullptr && cancel->load()) {
      if (!checkpoint.empty()) LONGKV_TRY(save(checkpoint));
      return fail(Code::kCancelled, "stopped at step {} of {} of stage {}{}", state_.step, steps, state_.stage,
                  checkpoint.empty() ? "; nothing is left of it" : "; run again to go on");
    }
    const int64_t number = state_.step + (refining ? options_.steps : 0);
    const int64_t at_once = int64_t(readings_.size()), turn = number % at_once, round = number / at_once;
    Reading& reading = readings_[size_t(turn)];
    const int64_t document = round / options_.lessons.questions * at_once + turn;
    LONGKV_TRY(read(reading, options_.lessons, document, length_of(document)));
    const auto asked = size_t(round % options_.lessons.questions) % reading.lesson.questions.size();
    const Student student = student_of(state_.values);
    const Result<double> loss = question_loss(reading, asked, student, &gradient);
    if (!loss.ok()) {
      // The last step led here, from values whose loss was a number.
      if (!good.values.empty()) state_ = std::move(good);
      if (!checkpoint.empty()) LONGKV_TRY(save(checkpoint));
      return loss.status();
    }
    good = state_;
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
      progress({state_.stage, state_.step, steps, mean, mean_share(student.counts), reading.lesson.kind});
    }
    if (!checkpoint.empty() && std::chrono::steady_clock::now() - saved > kCheckpointEvery) {
      LONGKV_TRY(try_to_save(checkpoint));
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
    if (options_.learned != Learned::kGates) {
      LONGKV_TRY(prepare_second_stage(cancel));
      if (!checkpoint.empty()) LONGKV_TRY(try_to_save(checkpoint));
    }
  }
  if (state_.stage == 2) LONGKV_TRY(run_stage(checkpoint, progress, cancel));
  // Gates rank heads; all of them open lose nothing, so the loss cannot choose among states.
  if (options_.learned == Learned::kGates) LONGKV_TRY(judge());
  if (!checkpoint.empty()) LONGKV_TRY(try_to_save(checkpoint));
  TrainResult result;
  if (options_.learned == Learned::kGates) {
    result.gates = state_.best_values;
  } else {
    result.mask = mask_of_values(state_.best_values, result.counts);
  }
  result.held_out_start = state_.held_out_start;
  result.held_out = state_.best;
  return result;
}

}  // namespace longkv
