// Attention of a decoded token over rows of q8_0 and q4_0, for attend_token().
#pragma once

#include "cuda/kv.h"

namespace longkv::card {

struct TokenArgs {
  AttendArgs a;
  TileList list;
  const int64_t* position;
  DecodeScratch scratch;
};
bool attends_quant(const CardKv& kv);  // whole tiles of 64, 128 or 256 channels
Status attend_quant(const TokenArgs& p, CardStreamHandle stream);

}  // namespace longkv::card
