#include "kv/attend_narrow.h"

#include "base/cpu.h"

namespace longkv {

#if defined(__x86_64__)

bool has_narrow_kernel(KvType type, int64_t dim) {
  return type == KvType::kF16 && dim % 16 == 0 && dim <= kNarrowChannels && active_isa() >= IsaLevel::kAvx512;
}

void narrow_key_product(const NarrowKeyTile& tile) { avx512::narrow_key_product(tile); }

#else

bool has_narrow_kernel(KvType, int64_t) { return false; }
void narrow_key_product(const NarrowKeyTile&) {}

#endif

}  // namespace longkv
