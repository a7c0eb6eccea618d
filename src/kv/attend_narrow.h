// Scores of f16 keys that keep few channels, as masks leave them. A row alone fills one or two vectors, and adding up
// their lanes costs more than the products: instead 16 rows are turned over, so that a lane belongs to a row.
#pragma once

#include <cstdint>

#include "kv/attend_quant.h"
#include "kv/types.h"

namespace longkv {

// Of 48 channels on turning costs more than it saves.
inline constexpr int64_t kNarrowChannels = 32;

// True when narrow_key_product() exists for such keys on this CPU at the active level. It depends on nothing but the
// rows' form, since a head's bits must not depend on its neighbours.
bool has_narrow_kernel(KvType type, int64_t dim);

struct NarrowKeyTile {
  const uint8_t* const* row = nullptr;  // [rows padded to 8]
  int64_t rows = 0;
  int64_t dim = 0;           // a multiple of 16
  const float* q = nullptr;  // [heads][q_stride]
  int64_t q_stride = 0;
  int heads = 0;  // 1 to 4
  AheadRows ahead;
  float* s = nullptr;  // [heads][s_stride], written for the padded rows
  int64_t s_stride = 0;
};
void narrow_key_product(const NarrowKeyTile& tile);

namespace avx512 {
void narrow_key_product(const NarrowKeyTile& tile);
}  // namespace avx512

}  // namespace longkv
