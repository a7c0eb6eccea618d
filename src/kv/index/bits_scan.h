// bits_scan_tiles and bits_scan_units (bits_layout.h) by levels of the CPU.
#pragma once

#include <cstdint>

#include "kv/index/bits_layout.h"

namespace longkv {

// Highway's, at every level.
void bits_scan_tiles_portable(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                              float* scores, int64_t stride);
void bits_scan_units_portable(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                              BitsPool pool, float root, float* scores, int64_t stride);
namespace avx512 {
void bits_scan_tiles(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                     float* scores, int64_t stride);
void bits_scan_units(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                     BitsPool pool, float root, float* scores, int64_t stride);
}  // namespace avx512

}  // namespace longkv
