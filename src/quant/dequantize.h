// Decoders of one block each; dequantize() in quant/tensor_type.h drives them.
//
// Order of the floating-point operations is part of the definition: the scale of a group is multiplied out first, then
// the quant, then the minimum is subtracted, each step rounded to fp32.
#pragma once

#include "quant/block_formats.h"

namespace longkv {

void decode_block(const BlockQ4_0& b, float out[kSmallBlock]);
void decode_block(const BlockQ4_1& b, float out[kSmallBlock]);
void decode_block(const BlockQ5_0& b, float out[kSmallBlock]);
void decode_block(const BlockQ5_1& b, float out[kSmallBlock]);
void decode_block(const BlockQ8_0& b, float out[kSmallBlock]);
void decode_block(const BlockIQ4_NL& b, float out[kSmallBlock]);

void decode_block(const BlockQ2_K& b, float out[kSuperBlock]);
void decode_block(const BlockQ3_K& b, float out[kSuperBlock]);
void decode_block(const BlockQ4_K& b, float out[kSuperBlock]);
void decode_block(const BlockQ5_K& b, float out[kSuperBlock]);
void decode_block(const BlockQ6_K& b, float out[kSuperBlock]);
void decode_block(const BlockIQ4_XS& b, float out[kSuperBlock]);

}  // namespace longkv
