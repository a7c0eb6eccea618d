// Bytes of rows under the store and mask stages of a recipe.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/recipe.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

struct StoreBytes {
  int64_t k = 0;
  int64_t v = 0;
};

// Channels of K that old rows keep, [layers][kv_heads]; empty: all. Reads a mask file. Errors: those of load_leank, and
// channels that a type cannot hold.
Result<std::vector<int>> kept_channels(const KvShape& shape, const Recipe& recipe);

// All KV heads of a layer holding `rows` rows, each array rounded up to `page` bytes. `windowed`: a layer with a
// sliding window, whose rows stay as they came.
StoreBytes stored_bytes(const KvShape& shape, const Recipe& recipe, const std::vector<int>& kept, int layer,
                        bool windowed, int64_t rows, int64_t page);
// Read by attending `attended` of `rows` rows of every KV head once: rows held as they came first.
int64_t attended_bytes(const KvShape& shape, const Recipe& recipe, const std::vector<int>& kept, int layer,
                       bool windowed, int64_t rows, int64_t attended);
// What the rows of a whole prompt take in one layer until they are encoded, beyond stored_bytes.
int64_t raw_prompt_bytes(const KvShape& shape, const Recipe& recipe, int64_t rows);

}  // namespace longkv
