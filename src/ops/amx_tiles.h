// Shapes of AMX tiles. Included by NAME_amx.cc files only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace longkv {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Of the calling thread, until _tile_release().
inline void load_tiles(const TileConfig& config) {
  // GCC's ldtilecfg says that it reads eight bytes, and stores of the others would be dropped.
  asm volatile("" : : "m"(config));
  _tile_loadconfig(&config);
}

// To be called before tiles are loaded: GCC's tile loads do not say that they read memory.
inline void settle_memory() { asm volatile("" : : : "memory"); }

}  // namespace
}  // namespace longkv
