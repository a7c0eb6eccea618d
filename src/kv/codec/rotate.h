// Hadamard rotation of rows: spreads outlier channels over their block, so that few bits fit all. H / sqrt(n) is its
// own inverse and symmetric, so q.k = (Rq).(Rk), and values come back by rotating what was summed.
#pragma once

#include <cstdint>

namespace longkv {

// Channels that are rotated together: the largest power of two that divides dim. Below kMinRotation it is of no use.
int64_t rotation_block(int64_t dim);
inline constexpr int64_t kMinRotation = 16;

// n rows of dim floats, src_stride and dst_stride floats apart; src may be dst.
void rotate_rows(const float* src, int64_t src_stride, int64_t n, int64_t dim, float* dst, int64_t dst_stride);

}  // namespace longkv
