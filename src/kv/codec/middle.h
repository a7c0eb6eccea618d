// Decoding of rows in a head's middle (KvMiddle).
#pragma once

#include <cstdint>

#include "kv/types.h"

namespace longkv {

// Rows [begin, end) of the middle, counted from its first, as fp32 [rows][dim_k of the head] (dropped channels are 0)
// and [rows][dim_v].
void decode_middle_k(const KvHeadView& head, int64_t begin, int64_t end, float* dst);
void decode_middle_v(const KvHeadView& head, int64_t begin, int64_t end, float* dst);

}  // namespace longkv
