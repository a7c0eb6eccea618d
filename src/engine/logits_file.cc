#include "engine/logits_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"

namespace longkv {

namespace {

constexpr char kMagic[] = {'_', 'l', 'o', 'g', 'i', 't', 's', '_'};
constexpr float kRange = 16.0f;  // logits further below the best are stored as that far below

template <class T, size_t N>
std::span<const uint8_t> bytes_of(std::span<T, N> values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()};
}

int64_t bytes_per_row(int64_t vocab) { return (round_up(vocab, 2) + 4) * 2; }

}  // namespace

Result<LogitsWriter> LogitsWriter::create(const std::string& path, int64_t window, int64_t vocab,
                                          std::span<const int32_t> tokens) {
  LogitsWriter w;
  w.path_ = path;
  LONGKV_ASSIGN(w.file_, AtomicFile::create(path));
  w.vocab_ = vocab;
  const int64_t windows = int64_t(tokens.size()) / window;
  w.rows_left_ = windows * scored_positions(window);
  w.row_.assign(size_t(bytes_per_row(vocab)) / 2, 0);
  const int32_t header[] = {int32_t(window), int32_t(vocab), int32_t(windows)};
  LONGKV_TRY(w.file_.write(bytes_of(std::span(kMagic))));
  LONGKV_TRY(w.file_.write(bytes_of(std::span(header))));
  LONGKV_TRY(w.file_.write(bytes_of(tokens.subspan(0, size_t(windows * window)))));
  return w;
}

Status LogitsWriter::append(const float* logits) {
  if (rows_left_ <= 0) return fail(Code::kInternal, "more rows than announced for '{}'", path_);
  float best = logits[0], least = logits[0];
  for (int64_t i = 1; i < vocab_; ++i) {
    best = std::max(best, logits[i]);
    least = std::min(least, logits[i]);
  }
  least = std::max(least, best - kRange);
  double sum = 0.0;
  for (int64_t i = 0; i < vocab_; ++i) sum += std::exp(double(logits[i]) - double(best));
  const float scale = (best - least) / 65535.0f;
  const float minimum = least - best - float(std::log(sum));
  std::memcpy(row_.data(), &scale, 4);
  std::memcpy(row_.data() + 2, &minimum, 4);
  for (int64_t i = 0; i < vocab_; ++i) {
    const bool inside = scale > 0.0f && logits[i] > least;
    row_[size_t(i + 4)] =
        inside ? uint16_t(std::min(65535.0f, std::nearbyint((logits[i] - least) / scale))) : uint16_t(0);
  }
  --rows_left_;
  return file_.write(bytes_of(std::span<const uint16_t>(row_)));
}

Status LogitsWriter::commit() {
  if (rows_left_ != 0) return fail(Code::kInternal, "{} rows are missing in '{}'", rows_left_, path_);
  return file_.commit();
}

Result<LogitsReader> LogitsReader::open(const std::string& path) {
  LogitsReader r;
  LONGKV_ASSIGN(r.file_, MappedFile::open(path));
  const std::span<const uint8_t> bytes = r.file_.bytes();
  constexpr size_t kHeader = sizeof(kMagic) + 12;
  if (bytes.size() < kHeader || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
    return fail(Code::kCorrupt, "'{}' is not a file of logits", path);
  }
  int32_t header[3];
  std::memcpy(header, bytes.data() + sizeof(kMagic), sizeof(header));
  if (header[0] < 2 || header[1] < 1 || header[2] < 1) {
    return fail(Code::kCorrupt, "'{}': window {}, vocabulary {}, {} windows make no sense", path, header[0], header[1],
                header[2]);
  }
  r.window_ = header[0];
  r.vocab_ = header[1];
  r.windows_ = header[2];
  r.row_bytes_ = bytes_per_row(r.vocab_);
  // Products of two 31-bit numbers fit 64 bits; the last one may not.
  const uint64_t token_bytes = uint64_t(r.windows_) * uint64_t(r.window_) * 4;
  const uint64_t rows = uint64_t(r.windows_) * uint64_t(scored_positions(r.window_));
  const auto row_total = checked_mul(rows, uint64_t(r.row_bytes_));
  const auto needed = row_total ? checked_add(*row_total, kHeader + token_bytes) : std::nullopt;
  if (!needed || *needed != bytes.size()) {
    return fail(Code::kCorrupt, "'{}' has {} bytes, its header asks for {}", path, bytes.size(), needed.value_or(0));
  }
  r.tokens_.resize(size_t(r.windows_ * r.window_));
  std::memcpy(r.tokens_.data(), bytes.data() + kHeader, token_bytes);
  r.rows_ = bytes.data() + kHeader + token_bytes;
  return r;
}

void LogitsReader::log_probabilities(int64_t row, float* out) const {
  const uint8_t* p = rows_ + row * row_bytes_;
  float scale, minimum;
  std::memcpy(&scale, p, 4);
  std::memcpy(&minimum, p + 4, 4);
  p += 8;
  for (int64_t i = 0; i < vocab_; ++i) {
    uint16_t v;
    std::memcpy(&v, p + i * 2, 2);
    out[i] = scale * float(v) + minimum;
  }
}

}  // namespace longkv
