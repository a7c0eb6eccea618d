// Learns what old keys can lose (LeanK, arXiv 2508.02215) or which heads need old rows (DuoAttention, arXiv 2410.10819)
// from documents and questions about them, by the exact gradient of what the model loses on the answers.
//
// A document is read once with full attention; its keys and values stay as they are and serve all its questions. For
// every question there are the teacher's rows (dense) and the student's (old rows masked), and the loss is one of
//   hidden      mean over answer rows of |h_teacher - h_student|^2 / mean |h_teacher|^2, the published one but for the
//               division, which makes lambda mean the same for models of any scale,
//   divergence  mean over answer rows of KL(teacher || student) of the next token,
// plus lambda * mean |value| in the first stage. Adam with beta 0.9 and 0.999, fp32 state; the rate rises over the
// first fifth of a stage from a tenth and falls back over the last.
//
// Channels and gates have a first stage that learns values in [0, 1] from 1. Channels and directions have a second one
// under the mask, without lambda: the mask is made anew from alpha at every step (or from frozen counts), the student
// sees alpha where it keeps a channel and 0 elsewhere, and the gradient goes to every alpha as if the mask were not
// there, so that channels can swap. Directions move freely in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/session.h"
#include "grad/chunk_model.h"
#include "kv/mask/leank.h"
#include "train/channel_counts.h"
#include "train/channel_quadratic.h"
#include "train/directions.h"
#include "train/lessons.h"

namespace longkv {

enum class Learned { kChannels, kDirections, kGates };
enum class TrainLoss { kHidden, kDivergence };
// How many channels a head keeps.
enum class Allocation {
  kThreshold,  // LeanK's, anew at every step
  kBytes,      // frozen: least loss for the bytes of K and V that dropping `ratio` of every head's channels would leave
  kChannels,   // frozen: least loss for as many channels as that; V of heads without any is saved on top
};

struct TrainOptions {
  Learned learned = Learned::kChannels;
  TrainLoss loss = TrainLoss::kHidden;
  int64_t sink = 128, window = 768;         // as the recipe that will use the result
  int64_t shortest = 2048, longest = 8192;  // tokens of documents
  int64_t lengths = 200;                    // evenly spaced between them, in drawn order
  int64_t steps = 0, refine_steps = 60;
  double rate = 0.02, refine_rate = 0.002;  // of directions: relative to their root mean square
  double lambda = 0.02;
  double ratio = 0.7;  // of the K channels dropped
  double bytes = 0.0;  // kBytes: share of K and V bytes of old rows to keep; 0: what `ratio` leaves
  int64_t align = 16;  // channels or directions are kept in multiples of this
  Allocation allocation = Allocation::kBytes;
  bool frozen_counts() const { return allocation != Allocation::kThreshold; }
  bool keep_scales = true;  // write alpha of kept channels; else 1
  bool compensate = true;   // the mean of what old keys lost is added back
  std::optional<RemovedAs>
      removed;  // what stands for heads that keep nothing; none: mean or drop, what loses less, head by head
  std::vector<bool> streaming;  // [layers][kv_heads], heads whose old rows go in any case (frozen counts); empty: none
  int64_t held_out = 8;         // questions of each kind that judge what is written
  // Of each kind, held at once: what the second stage begins with comes from all of them, then their questions take
  // turns. As many others judge.
  int64_t documents = 1;
  LessonOptions lessons;
};

// What goes on, for a progress line.
struct TrainProgress {
  int stage = 1;  // 1, 2
  int64_t step = 0, steps = 0;
  double loss = 0;   // without lambda's part, mean of the last steps
  double share = 1;  // of channels, directions or gates kept
  std::string kind;  // of the lesson
};

struct TrainResult {
  LeankMask mask;             // channels and directions
  std::vector<float> gates;   // [layers][kv_heads]
  ChannelCounts counts;       // channels and directions
  double held_out_start = 0;  // loss on questions that nothing was learned from, before the last stage and as written
  double held_out = 0;
};

class Trainer {
 public:
  // With `card`, which has the weights of this very model, documents are read there and what is heavy is computed
  // there; card_chunk: tokens of a document that pass a layer together, 0 as memory and speed suggest.
  // Errors: kInvalidArgument (options), kUnsupported (nothing in the model can be learned, or not on a card),
  // kOutOfMemory.
  static Result<std::unique_ptr<Trainer>> create(const std::shared_ptr<const LoadedModel>& model,
                                                 const Tokenizer& tokenizer, const TrainOptions& options,
                                                 ThreadPool& pool, const std::shared_ptr<CardModel>& card = nullptr,
                                                 int64_t card_chunk = 0);

  // Runs to the end, or until `cancel`. With `checkpoint`, the state is written there at least once a minute and before
  // returning, and read from there at the start when the file exists.
  // Errors: kCancelled (the checkpoint holds the state), kInternal (the loss is no number; the last good state stays in
  // the checkpoint), kCorrupt or kInvalidArgument (a checkpoint that is damaged or belongs to other options), kIo.
  Result<TrainResult> run(const std::string& checkpoint, const std::function<void(const TrainProgress&)>& progress,
                          const std::atomic<bool>* cancel);

  const MaskShape& shape() const { return shape_; }
  bool on_card() const { return reader_->on_card(); }

 private:
  struct State {
    int stage = 1;
    int64_t step = 0;                          // of the stage
    std::vector<float> values, first, second;  // Adam's moments
    ChannelCounts frozen;                      // frozen_counts()
    std::vector<OldHead> heads;                // the same: what stands for each that keeps nothing; `removed` not set
    double held_out_start = 0;
    double best = 0;  // held-out loss of `best_values`; 0: none yet
    std::vector<float> best_values;
  };
  // How the student sees old rows under the present values.
  struct Student {
    std::vector<float> values;  // of OldMask
    std::vector<OldHead> heads;
    ChannelCounts counts;  // second stage
    OldMask mask(const TrainOptions& options, const ChunkTape* teacher) const;
  };
  // A document as it was read, and what is asked about it.
  struct Reading {
    std::unique_ptr<KvSession> kv;
    uint64_t id = 0;  // of these rows, ChunkPrompt
    Lesson lesson;
    int64_t index = -1;  // of the lesson; -1: none
    // The teacher's final rows by question, [tokens][dim], recorded when first wanted. Gates need all of its tape.
    std::vector<std::vector<float>> teacher;
  };
  // What keeping i * align channels or directions of a head loses, [heads][dim_k / align + 1].
  using Curves = std::vector<double>;

  Trainer(std::shared_ptr<const LoadedModel> model, const Tokenizer& tokenizer, const TrainOptions& options,
          ThreadPool& pool);
  Status open_reader(const std::shared_ptr<CardModel>& card, int64_t card_chunk);
  Status read(Reading& reading, const LessonOptions& options, int64_t index, int64_t tokens);
  Status read_first_documents();
  ChunkPrompt prompt_of(const Reading& reading, const Question& question) const;
  Result<double> question_loss(Reading& reading, size_t question, const Student& student, std::vector<float>* gradient);
  Status run_stage(const std::string& checkpoint, const std::function<void(const TrainProgress&)>& progress,
                   const std::atomic<bool>* cancel);
  Status judge();
  // A checkpoint that cannot be written is said and not waited for: what was learned so far lives on in memory.
  Status try_to_save(const std::string& checkpoint) const;

  // trainer_values.cc: from values to masks and back.
  std::vector<float> effective_alpha(const std::vector<float>& values, ChannelCounts* counts) const;
  Student student_of(const std::vector<float>& values) const;
  void gradient_of_values(const std::vector<float>& dmask, std::vector<float>& gradient) const;
  void adam(const std::vector<float>& gradient, double rate);
  double mean_share(const ChannelCounts& counts) const;
  LeankMask mask_of_values(const std::vector<float>& values, ChannelCounts& counts) const;

  // trainer_prepare.cc: what the second stage begins with.
  Status prepare_second_stage(const std::atomic<bool>* cancel);
  Status each_question(const std::atomic<bool>* cancel, size_t most,
                       const std::function<Status(const Reading&, const Question&)>& visit) const;
  Result<std::vector<std::vector<int>>> elimination_orders(const std::atomic<bool>* cancel);
  Status add_quadratics(const Reading& reading, const Question& question, const std::vector<float>& mask,
                        std::vector<ChannelQuadratic>& quadratics);
  void spread_over_positions(int layer, std::vector<double>& moment) const;
  Result<std::vector<Directions>> find_directions(const std::atomic<bool>* cancel);
  Result<Curves> measure_curves(const std::vector<std::vector<float>>& mixes, const std::atomic<bool>* cancel);

  RowRange middle_of(int64_t document) const;
  int64_t length_of(int64_t document) const;
  std::string description() const;
  Status save(const std::string& path) const;
  Status load(const std::string& path);

  std::shared_ptr<const LoadedModel> model_;
  const Tokenizer& tokenizer_;
  TrainOptions options_;
  ThreadPool& pool_;
  MaskShape shape_;
  std::unique_ptr<ChunkModel> chunks_;
  std::unique_ptr<Session> reader_;  // reads documents into the caches of readings
  uint64_t documents_read_ = 0;
  std::vector<Reading> readings_;  // of all kinds of lesson in turn: their questions take turns
  std::vector<Reading> held_out_;  // the same, of documents that nothing is learned from
  ChunkTape teacher_, student_;
  State state_;
};

}  // namespace longkv
