// A file of recorded log-probabilities, to compare another run with. The layout is that of llama-perplexity's
// --kl-divergence-base files, so either program can read what the other wrote:
//   "_logits_", int32 window, int32 vocabulary, int32 windows, int32 tokens[windows * window], then for each scored
//   position a row: float scale, float minimum, uint16 value[vocabulary rounded up to even],
//   log-probability = scale * value + minimum.
// Scored positions of a window: from window / 2 to window - 2; position j predicts token j + 1.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "base/mapped_file.h"
#include "longkv/status.h"

namespace longkv {

// Number of scored positions in a window.
inline int64_t scored_positions(int64_t window) { return window - 1 - window / 2; }

class LogitsWriter {
 public:
  // A failed or interrupted run leaves no half file (base/atomic_file.h).
  static Result<LogitsWriter> create(const std::string& path, int64_t window, int64_t vocab,
                                     std::span<const int32_t> tokens);
  // The next scored position's logits: [vocab]. Errors: kIo (a full disk).
  Status append(const float* logits);
  // Errors: kIo; kInternal when rows are missing.
  Status commit();

 private:
  std::string path_;
  AtomicFile file_;
  int64_t vocab_ = 0;
  int64_t rows_left_ = 0;
  std::vector<uint16_t> row_;
};

class LogitsReader {
 public:
  // Errors: kIo, kCorrupt (sizes that contradict the file's length).
  static Result<LogitsReader> open(const std::string& path);

  int64_t window() const { return window_; }
  int64_t vocab() const { return vocab_; }
  int64_t windows() const { return windows_; }
  std::span<const int32_t> tokens() const { return tokens_; }
  // Recorded log-probabilities of scored position `row` (of all windows, in order) into out[vocab].
  void log_probabilities(int64_t row, float* out) const;

 private:
  MappedFile file_;
  int64_t window_ = 0, vocab_ = 0, windows_ = 0;
  std::vector<int32_t> tokens_;
  const uint8_t* rows_ = nullptr;
  int64_t row_bytes_ = 0;
};

}  // namespace longkv
