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
bool attends_quant(const CardKv& kv);  // whole tiles; 64, 128 and, of q4_0, 256 channels: what two tiles a warp fit
                                       // into shared memory of
Status attend_quant(const TokenArgs& p, CardStreamHandle stream);

}  // namespace longkv::card
