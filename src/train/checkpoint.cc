// The trainer's state as a GGUF file: nothing that a killed run has learned is lost but the last seconds.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "gguf/gguf.h"
#include "gguf/writer.h"
#include "train/trainer.h"

namespace longkv {

namespace {

constexpr int64_t kVersion = 2;

Status add_values(GgufWriter& writer, const char* name, const std::vector<float>& values) {
  const int64_t dims[] = {int64_t(values.size())};
  return writer.add_tensor(name, TensorType::kF32, dims,
                           {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)});
}

Status read_values(const GgufFile& file, const std::string& path, const char* name, size_t n,
                   std::vector<float>& values) {
  const TensorInfo* tensor = file.find(name);
  if (tensor == nullptr || tensor->type != TensorType::kF32 || tensor->elements() != int64_t(n)) {
    return fail(Code::kCorrupt, "{}: the tensor {} must hold {} f32 values; delete the file to begin anew", path, name,
                n);
  }
  values.resize(n);
  std::memcpy(values.data(), tensor->data, n * sizeof(float));
  return {};
}

}  // namespace

// Everything that decides what a run learns.
std::string Trainer::description() const {
  const TrainOptions& o = options_;
  uint64_t texts = std::hash<std::vector<bool>>{}(o.streaming);
  for (const std::string& t : o.lessons.texts) texts = texts * 31 + std::hash<std::string>{}(t);
  return fmt::format(
      "model={} learned={} loss={} sink={} window={} lengths={}-{}/{} steps={}+{} rates={}+{} lambda={} ratio={} "
      "align={} "
      "allocation={} "
      "share={} scales={} compensate={} removed={} generated={} held_out={} seed={} documents={} questions={} chunk={} "
      "texts={:x}",
      fmt::format("{}/{}", model_->config().name, model_->file().file_bytes()), int(o.learned), int(o.loss), o.sink,
      o.window, o.shortest, o.longest, o.lengths, o.steps, o.refine_steps, o.rate, o.refine_rate, o.lambda, o.ratio,
      o.align, int(o.allocation), o.bytes, o.keep_scales, o.compensate, o.removed ? int(*o.removed) : -1,
      o.lessons.generated, o.held_out, o.lessons.seed, o.documents, o.lessons.questions, o.lessons.max_chunk, texts);
}

Status Trainer::save(const std::string& path) const {
  GgufWriter writer;
  LONGKV_TRY(writer.add_u32("train.version", uint32_t(kVersion)));
  LONGKV_TRY(writer.add_string("train.options", description()));
  LONGKV_TRY(writer.add_u32("train.stage", uint32_t(state_.stage)));
  LONGKV_TRY(writer.add_i64("train.step", state_.step));
  LONGKV_TRY(writer.add_f64("train.held_out_start", state_.held_out_start));
  LONGKV_TRY(writer.add_f64("train.best", state_.best));
  if (!state_.frozen.empty()) {
    const std::vector<int32_t> counts(state_.frozen.begin(), state_.frozen.end());
    LONGKV_TRY(writer.add_i32s("train.counts", counts));
    std::vector<int32_t> removed;
    std::vector<float> scores;
    for (const OldHead& head : state_.heads) {
      removed.push_back(int32_t(head.as));
      scores.push_back(head.score);
    }
    LONGKV_TRY(writer.add_i32s("train.removed", removed));
    LONGKV_TRY(writer.add_f32s("train.scores", scores));
  }
  LONGKV_TRY(add_values(writer, "train.values", state_.values));
  LONGKV_TRY(add_values(writer, "train.first", state_.first));
  LONGKV_TRY(add_values(writer, "train.second", state_.second));
  if (!state_.best_values.empty()) LONGKV_TRY(add_values(writer, "train.best_values", state_.best_values));
  return writer.write(path);
}

Status Trainer::load(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return {};
  LONGKV_ASSIGN(const GgufFile file, GgufFile::open(path));
  const Metadata& meta = file.metadata();
  LONGKV_ASSIGN(const int64_t version, meta.integer("train.version", 0, int64_t{1} << 20));
  LONGKV_ASSIGN(const std::string_view options, meta.string("train.options"));
  if (version != kVersion || options != description()) {
    return fail(Code::kInvalidArgument,
                "{} holds the state of another run\n  found    {}\n  expected {}\ndelete it, or name another file with "
                "--checkpoint",
                path, options, description());
  }
  State s;
  LONGKV_ASSIGN(const int64_t stage, meta.integer("train.stage", 1, 2));
  s.stage = int(stage);
  LONGKV_ASSIGN(s.step, meta.integer("train.step", 0, stage == 1 ? options_.steps : options_.refine_steps));
  LONGKV_ASSIGN(s.held_out_start, meta.real("train.held_out_start"));
  LONGKV_ASSIGN(s.best, meta.real("train.best"));
  if (options_.frozen_counts() && s.stage == 2) {
    LONGKV_ASSIGN(s.frozen, meta.integers("train.counts", shape_.heads(), 0, shape_.dim_k));
    LONGKV_ASSIGN(const std::vector<int64_t> removed,
                  meta.integers("train.removed", shape_.heads(), 0, int(RemovedAs::kDrop)));
    LONGKV_ASSIGN(const std::vector<double> scores, meta.reals("train.scores", shape_.heads()));
    for (size_t h = 0; h < removed.size(); ++h) {
      s.heads.push_back({false, RemovedAs(removed[h]), float(scores[h])});
    }
  }
  size_t n = state_.values.size();
  const bool directions = options_.learned == Learned::kDirections;
  if (directions && s.stage == 2) {
    n = 0;
    for (int64_t count : s.frozen) n += size_t(2 * count * shape_.dim_k);
  }
  LONGKV_TRY(read_values(file, path, "train.values", n, s.values));
  LONGKV_TRY(read_values(file, path, "train.first", n, s.first));
  LONGKV_TRY(read_values(file, path, "train.second", n, s.second));
  if (file.find("train.best_values") != nullptr) {
    LONGKV_TRY(read_values(file, path, "train.best_values", n, s.best_values));
  }
  for (const std::vector<float>* values : {&s.values, &s.best_values}) {
    for (float v : *values) {
      if (!(directions ? std::isfinite(v) : v >= 0.0f && v <= 1.5f)) {
        return fail(Code::kCorrupt, "{}: a value of {} cannot have been learned; delete the file to begin anew", path,
                    v);
      }
    }
  }
  state_ = std::move(s);
  log_info("going on from {}: stage {}, step {}", path, state_.stage, state_.step);
  return {};
}

}  // namespace longkv
