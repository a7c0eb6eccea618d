#include "kv/attend_quant.h"

#include "base/cpu.h"

namespace longkv {

// 64 channels take five vectors of 32 bytes (attend_quant_avx2.cc), or two groups of 80 (attend_quant_avx512vnni.cc),
// or eight vectors of 64 (attend_fp8_avx512vnni.cc), which a scale follows.
int64_t quant_query_bytes(KvType type, int64_t dim) {
  return type == KvType::kFp8 ? (dim + 63) / 64 * 512 + 64 : (dim + 63) / 64 * 160;
}

#if defined(__x86_64__)

namespace {
bool has_vnni() { return active_isa() >= IsaLevel::kAvx512Vnni; }
}  // namespace

bool has_quant_kernels(KvType type) {
  if (active_isa() >= IsaLevel::kNeon) return false;
  return kv_type_quantized(type) ? active_isa() >= IsaLevel::kAvx2 : type == KvType::kFp8 && has_vnni();
}

void prepare_quant_query(KvType type, const float* q, int64_t dim, uint8_t* prepared) {
  if (type == KvType::kFp8) return avx512vnni::prepare_fp8_query(q, dim, prepared);
  has_vnni() ? avx512vnni::prepare_quant_query(type, q, dim, prepared)
             : avx2::prepare_quant_query(type, q, dim, prepared);
}

void quant_key_product(const QuantKeyTile& tile) {
  if (tile.type == KvType::kFp8) return avx512vnni::fp8_key_product(tile);
  has_vnni() ? avx512vnni::quant_key_product(tile) : avx2::quant_key_product(tile);
}

void quant_value_product(const QuantValueTile& tile) {
  if (tile.type == KvType::kFp8) return avx512vnni::fp8_value_product(tile);
  has_vnni() ? avx512vnni::quant_value_product(tile) : avx2::quant_value_product(tile);
}

#else

bool has_quant_kernels(KvType) { return false; }
void prepare_quant_query(KvType, const float*, int64_t, uint8_t*) {}
void quant_key_product(const QuantKeyTile&) {}
void quant_value_product(const QuantValueTile&) {}

#endif

}  // namespace longkv
