// Settings of the prefill stage: which scores are computed while a prompt is read.
#pragma once

#include <cstdint>
#include <string>

namespace longkv {

enum class PrefillKind {
  kDense,
  kAShape,         // first rows and a window
  kVerticalSlash,  // columns and diagonals chosen by the chunk's last queries
  kBlockSparse,    // best blocks by the product of means
  kMInference,     // one of the three for each query head, read from a file
  kFlex,           // by head and chunk: pooled blocks, or columns and diagonals; sizes follow the mass
  kXAttention,     // blocks by sums of antidiagonals, as many as reach a share of the mass
};

enum class MissingHeads { kError, kVerticalSlash };

struct PrefillSpec {
  PrefillKind kind = PrefillKind::kDense;
  int64_t threshold = 32768;  // prompts that end before this position are read densely
  int64_t chunk = 4096;       // queries of one estimate; prompts are read in chunks of at least so many tokens
  int64_t last = 256;         // last queries of the prompt that attend everything: they carry the question
  int dense_layers = 2;       // first layers that attend everything

  int64_t sink = 128;        // a_shape, xattention: first rows
  int64_t window = 3968;     // a_shape: rows before each query, its own included
  int64_t columns = 1000;    // vertical_slash
  int64_t diagonals = 6096;  // vertical_slash
  int64_t blocks = 100;      // block_sparse: blocks of 64 for each block of 64 queries
  std::string file;          // minference: assignment; empty = every head vertical_slash(columns, diagonals)
  MissingHeads missing = MissingHeads::kError;  // minference: heads that the file does not name

  int64_t stride = 16;        // xattention: 8 or 16
  double share = 0.9;         // xattention (tau), flex (gamma): mass that the chosen blocks reach
  int64_t min_blocks = 16;    // xattention: blocks of 128 for each block of 128 queries at least
  bool shared = false;        // xattention: the query heads of a KV head read the union of their blocks
  double trust = 0.1;         // flex (tau): largest distance at which pooled scores are trusted
  int64_t min_budget = 1024;  // flex: rows for each block of queries at least
};

// Whether a file says what each query head does.
inline bool assigns_by_file(const PrefillSpec& spec) {
  return spec.kind == PrefillKind::kMInference && !spec.file.empty();
}

}  // namespace longkv
