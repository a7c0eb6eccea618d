// Rotary position embedding: one table of frequencies per model (two where sliding-window layers have their own base).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/threads.h"
#include "longkv/status.h"

namespace longkv {

enum class RopeScaling { kNone, kLinear, kNtk, kYarn, kLongRope };
enum class RopePairs {
  kAdjacent,  // channels (2i, 2i+1): llama family, whose q and k rows are permuted in GGUF files
  kHalves,    // channels (i, i + dim/2): neox style
};

struct RopeConfig {
  RopePairs pairs = RopePairs::kAdjacent;
  int dim = 0;  // rotated channels, the first of a head; even
  double base = 10000.0;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;                       // how far beyond the original context
  int64_t original_context = 0;              // yarn, longrope
  double attn_factor = 0.0;                  // magnitude of cos and sin; 0 = the scaling type's own rule
  double beta_fast = 32.0, beta_slow = 1.0;  // yarn's ramp, in rotations over the original context
  std::vector<float> freq_divisors;          // [dim/2], Llama-3 `rope_freqs` or longrope factors; empty = none
};

// cos and sin of any position from two small tables (position = 1024 a + b, addition theorem in double), so that
// angles stay exact to fp32 at a million tokens without a table of that length.
class RopeTable {
 public:
  RopeTable() = default;
  // Formulas: linear and NTK (base * factor^(dim/(dim-2))): position interpolation papers; YaRN: arXiv 2309.00071,
  // sections 3.2 and 3.4; longrope: per-channel divisors. max_position: first position that is never asked for.
  RopeTable(const RopeConfig& config, int64_t max_position);

  // Writes cos[dim/2] and sin[dim/2], magnitude included.
  void angles(int64_t position, float* cos, float* sin) const;
  int dim() const { return dim_; }
  RopePairs pairs() const { return pairs_; }
  const std::vector<float>& inverse_frequencies() const { return inv_freq_; }
  double magnitude() const { return magnitude_; }

 private:
  static constexpr int64_t kFine = 1024;
  int dim_ = 0;
  RopePairs pairs_ = RopePairs::kAdjacent;
  double magnitude_ = 1.0;
  std::vector<float> inv_freq_;  // fp32, as the reference implementations hold them
  std::vector<double> fine_;     // [kFine][dim/2][cos, sin]
  std::vector<double> coarse_;   // [max_position / kFine + 1][dim/2][cos, sin]
};

// Rotates x: [tokens][heads][head_dim] in place; token t has position first_position + t.
void apply_rope(const RopeTable& table, float* x, int64_t tokens, int heads, int head_dim, int64_t first_position,
                ThreadPool& pool);

// Turns n rows by `delta` positions, which may be negative or fractional: a pure rotation, for rows that already carry
// the table's magnitude. Row i at x + i * stride.
void turn_rows(const RopeTable& table, double delta, float* x, int64_t n, int64_t stride);

}  // namespace longkv
