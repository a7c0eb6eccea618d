// Results on disk: one line of JSON for every sample and recipe, flushed to the device before the next is computed, so
// that a run that was killed goes on where it stopped and neither loses nor repeats a sample.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <vector>

#include "longkv/status.h"

namespace longkv {

struct EvalRecord {
  std::string suite, task;
  int version = 1;
  int64_t length = 0;  // target; what the cell of a table is
  double depth = -1, real_depth = -1;
  int64_t index = 0;
  uint64_t seed = 0;
  std::string kv;        // canonical recipe; the noise row is full attention with "@threads=N" behind it
  std::string label;     // as typed
  std::string question;  // "hidden" or "seen"
  std::string sparse;    // phases that the recipe computes differently from full attention
  std::string metric;
  std::string skipped;  // reason; empty: it was answered
  double score = 0;     // 0 to 1, or nats per token where metric is nll
  std::string text, finish;
  std::vector<std::string> references;
  int64_t candidates = 0;  // right and wrong values that the answer names
  uint64_t answer_hash = 0, prompt_hash = 0;
  int64_t prompt_tokens = 0, document_tokens = 0, new_tokens = 0, answer_tokens = 0, units = 0;
  int64_t compared = 0, checked = 0;
  double kl_mean = 0, kl_max = 0, same_top = 0, captured_mass = 0, output_error = 0;
  std::vector<double> kl_buckets, layer_mass, head_mass;  // head_mass: [layers][kv_heads]
  std::string read_on;                                    // what read the prompt: "CPU" or a card's name
  int64_t jobs = 1;  // prompts that were played at the same time: times are then of a machine that was shared
  bool shared_prefill = false;
  double prefill_seconds = 0, seconds_per_token = 0;
  double kept_rows = 0, rows_attended = 0, bytes_per_token = 0;
  int64_t kept_bytes = 0, index_bytes = 0;

  std::string key() const;  // what makes it the same sample and recipe
  nlohmann::ordered_json to_json() const;
  // Errors: kCorrupt naming the field.
  static Result<EvalRecord> from_json(const nlohmann::json& json);
};

// What every line of a folder has in common: model, wording, seed, ... A run goes on only where it is the same.
using EvalRunInfo = nlohmann::ordered_json;

class EvalStore {
 public:
  static constexpr int kFormat = 2;

  // Opens or creates DIR/samples.jsonl and DIR/run.json. A last line that a kill tore is removed, with a notice.
  // Errors: kIo (cannot be created or written), kInvalidArgument (`info` differs from run.json's: another model,
  // version, seed; another process writes there), kCorrupt (a line that is no record: line and byte offset).
  static Result<EvalStore> open(const std::string& dir, const EvalRunInfo& info);
  // Reads DIR for a report, without `info`.
  static Result<EvalStore> read(const std::string& dir);

  EvalStore(EvalStore&& other) noexcept;
  EvalStore& operator=(EvalStore&& other) noexcept;
  EvalStore(const EvalStore&) = delete;
  EvalStore& operator=(const EvalStore&) = delete;
  ~EvalStore();

  bool has(const std::string& key) const { return keys_.contains(key); }
  // One write and one flush to the device. Errors: kIo (a full disk); the file then ends after the line before.
  Status append(const EvalRecord& record);

  const std::vector<EvalRecord>& records() const { return records_; }
  const EvalRunInfo& info() const { return info_; }

 private:
  EvalStore() = default;
  Status load(bool writes);

  std::string dir_;
  int fd_ = -1;
  EvalRunInfo info_;
  std::vector<EvalRecord> records_;
  std::unordered_set<std::string> keys_;
};

// Writes a whole file of results aside and renames it. Errors: kIo.
Status write_whole(const std::string& path, const std::string& text);

}  // namespace longkv
