// Encoding and decoding of K and V rows.
//
// f32, f16, bf16: the values in order. q8_0: dim int8 values, then dim/32 f16 scales; value = q * scale. q4_0: dim/2
// bytes of nibbles (value i of a group of 32 in the low nibble of byte i for i < 16, the high nibble of byte i-16
// else), then dim/32 f16 scales; value = (nibble - 8) * scale. fp8: dim bytes of E4M3 (OCP: bias 7, largest 448, no
// infinity), then one bf16 scale; value = E4M3 * scale, where the row's largest magnitude becomes 448. Rounding is to
// nearest (even for f16, bf16 and E4M3). A group of 32 (fp8: a row) with a value that is not finite decodes to NaN; a
// value beyond f16's range becomes infinite in f16.
#pragma once

#include <cstdint>

#include "kv/types.h"

namespace longkv {

// One row of `dim` fp32 channels to its stored form and back.
void encode_row(KvType type, const float* src, int64_t dim, uint8_t* dst);
void decode_row(KvType type, const uint8_t* src, int64_t dim, float* dst);
// n rows; strides in floats for fp32 rows and in bytes for stored rows.
void encode_rows(KvType type, const float* src, int64_t src_stride, int64_t n, int64_t dim, uint8_t* dst,
                 int64_t dst_stride);
void decode_rows(KvType type, const uint8_t* src, int64_t src_stride, int64_t n, int64_t dim, float* dst,
                 int64_t dst_stride);
// Rows [begin, end) of a head's K or V to fp32, [end - begin][dim].
void decode_k_rows(const KvHeadView& head, int64_t begin, int64_t end, float* dst);
void decode_v_rows(const KvHeadView& head, int64_t begin, int64_t end, float* dst);

}  // namespace longkv
