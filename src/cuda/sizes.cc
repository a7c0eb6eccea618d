// Sizes of what lies on a card, also for machines and builds without one.
#include "cuda/bits.h"
#include "cuda/kv.h"
#include "cuda/old.h"
#include "cuda/select.h"

namespace longkv::card {

bool card_kv_supports(KvType type, int dim) {
  return (attended_in_place(type) || type == KvType::kQ8_0 || type == KvType::kQ4_0 || type == KvType::kFp8) &&
         (dim == 64 || dim == 96 || dim == 128 || dim == 256);
}

bool card_old_supports(KvType type, int dim) {
  return (type == KvType::kF16 || type == KvType::kKivi2 || type == KvType::kKivi4) &&
         (dim == 64 || dim == 128 || dim == 256);
}

int64_t card_kv_bytes(KvType type, int kv_heads, int dim, int64_t capacity) {
  return 2 * int64_t(kv_heads) * capacity * (value_bytes(type, dim) + 2 * scale_count(type, dim));
}

CardKv place_kv(KvType type, int kv_heads, int dim, int64_t capacity, uint8_t* memory) {
  CardKv kv{type, kv_heads, dim, capacity, memory, nullptr, nullptr, nullptr};
  const int64_t rows = int64_t(kv_heads) * capacity, plane = rows * value_bytes(type, dim);
  kv.v = memory + plane;
  if (scale_count(type, dim) > 0) {
    kv.k_scale = reinterpret_cast<half_t*>(memory + 2 * plane);
    kv.v_scale = kv.k_scale + rows * scale_count(type, dim);
  }
  return kv;
}

BlockStore place_store(KvType type, int kv_heads, int dim, int block, int64_t blocks, uint8_t* memory) {
  BlockStore s{type,
               kv_heads,
               dim,
               block,
               blocks,
               int64_t(block) * value_bytes(type, dim),
               int64_t(block) * scale_count(type, dim) * 2,
               0,
               memory};
  s.record = 2 * (s.plane + s.scales);
  return s;
}

int64_t summary_bytes(SummaryKind kind, int kv_heads, int dim, int64_t blocks) {
  const int64_t each = kind == SummaryKind::kMean ? 2 * dim : kind == SummaryKind::kBox ? 4 * dim : 2 * dim + 8;
  return kv_heads * blocks * each;
}

int64_t bits_bytes(int block, int kv_heads, int dim, int64_t capacity) {
  return kv_heads * CardBits::tokens_of(block, capacity) * (dim / 32) * int64_t(sizeof(uint32_t) + sizeof(half_t));
}

int64_t BitsScratch::bytes(int heads, int kv_heads, int block, int64_t capacity) {
  const int64_t padded = int64_t(kv_heads) * ((heads / kv_heads + 3) / 4 * 4);
  return padded * (CardBits::tokens_of(block, capacity) / 16) * 4 + int64_t(heads) * 2 * kParts * 4 + 16;
}

}  // namespace longkv::card
