// Products of rows with many columns at once, for hashing and clustering.
//
// Columns lie in tiles of 16, transposed: [channel][16]. A row's products do not depend on its neighbours.
#pragma once

#include <cstdint>

namespace longkv {

constexpr int64_t kColumnTile = 16;

// out[i * stride + c] = sum over channels of x[i * dim + channel] * tile[channel * 16 + c], for n rows and 16 columns.
void column_products(const float* x, int64_t n, int64_t dim, const float* tile, float* out, int64_t stride);

// For each of n rows the column of `tiles` tiles with the largest product; the lowest of equal ones. NaN never wins.
void best_columns(const float* x, int64_t n, int64_t dim, const float* tiles, int64_t n_tiles, int32_t* best);

}  // namespace longkv
