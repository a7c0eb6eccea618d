// The store and mask stages of a recipe: how rows are encoded, and which K channels old rows keep.
#pragma once

#include <cstdint>
#include <string>

#include "kv/types.h"

namespace longkv {

enum class StoreRotate { kNone, kBoth, kK, kV };  // Hadamard rotation before encoding

// K and V apart. With a window, sinks or kivi types, only the rows between the first `sink` and the last `window` have
// these types; the others are f16 where it is an encoding.
struct StoreSpec {
  KvType k = KvType::kF16;
  KvType v = KvType::kF16;
  int64_t sink = 0;
  int64_t window = 0;
  StoreRotate rotate = StoreRotate::kNone;
  KvTypes types() const { return {k, v}; }
  bool rotates_k() const { return rotate == StoreRotate::kBoth || rotate == StoreRotate::kK; }
  bool rotates_v() const { return rotate == StoreRotate::kBoth || rotate == StoreRotate::kV; }
  bool operator==(const StoreSpec&) const = default;
};

enum class MaskKind { kNone, kLeank, kThink };

// Which channels of K rows between the first `sink` and the last `window` keep.
struct MaskSpec {
  MaskKind kind = MaskKind::kNone;
  std::string mask;  // leank: file
  int64_t sink = 0;
  int64_t window = 0;
  // What old keys lost counts as its mean over them; leank: as the mask was learned, unless told.
  enum class Mean { kLearned, kOn, kOff } mean = Mean::kLearned;
  // leank: what stands for the old rows of heads that keep nothing of K.
  enum class Removed { kLearned, kMean, kConstant, kDrop } removed = Removed::kLearned;
  double ratio = 0.4;    // think: share of the channels dropped
  int64_t queries = 32;  // think: last queries of the prompt that decide
  bool operator==(const MaskSpec&) const = default;
};

// The regions that the two stages ask for together.
struct StoreRegions {
  bool on = false;   // else every row has `raw` types
  KvTypes raw;       // of the cache's own rows
  KvTypes old;       // of encoded ones
  int64_t sink = 0;  // first rows and last ones that stay raw: the larger of what both stages ask for
  int64_t window = 0;
};
StoreRegions store_regions(const StoreSpec& store, const MaskSpec& mask);

}  // namespace longkv
