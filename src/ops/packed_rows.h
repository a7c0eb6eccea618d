// Weights rearranged so that eight rows are read as one vector: the form from which x86 decodes fastest.
//
// A matrix is a sequence of groups of eight rows, a group a sequence of its block columns (32 columns each). One column
// of blocks, n = 8 times the file's block:
//   8 halves      scale d of rows 0 .. 7
//   8 halves      minimum m of rows 0 .. 7; q4_1 and q5_1 only
//   4 x 32 bytes  vector j holds, at byte 4 r + c, value 4 j + c of row r in the low half and value 16 + 4 j + c in the
//                 high one: the 32-bit words of the file's block, the same word of every row side by side
//   32 bytes      bit k of byte 4 r + c is the fifth bit of value 4 k + c of row r; q5_0 and q5_1 only
// A broadcast of four activations then meets the same four columns of eight rows, and nothing is summed across lanes.
// The last group is filled up with rows of zeros. The bytes are those of the file, at most seven rows more.
#pragma once

#include <cstdint>

#include "base/threads.h"
#include "ops/weight.h"

namespace longkv {

inline constexpr int64_t kPackedRows = 8;

// Whether the kernels of active_isa() read this type's packed form (q4_0, q4_1, q5_0, q5_1 on AVX2 and above).
bool reads_packed(TensorType type);
// Bytes of the packed form of `w`.
int64_t packed_bytes(const Weight& w);
// Writes it; `out` has packed_bytes(w) bytes, zero-filled. Only for types that reads_packed().
void pack_rows(const Weight& w, uint8_t* out, ThreadPool& pool);
// Rows [first, first + n) of a packed `w` as they lie in the file: n * w.row_bytes bytes.
void unpack_rows(const Weight& w, int64_t first, int64_t n, uint8_t* out);

}  // namespace longkv
