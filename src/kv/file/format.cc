#define XXH_INLINE_ALL
#include "kv/file/format.h"

#include <fmt/format.h>
#include <xxhash.h>

namespace longkv {

std::string KvFileId::hex() const { return fmt::format("{:016x}{:016x}", high, low); }

uint64_t kv_checksum(const void* data, uint64_t bytes) { return XXH3_64bits(data, size_t(bytes)); }

std::vector<ByteRange> page_spans(std::span<const ByteRange> live) {
  std::vector<ByteRange> spans;
  for (const ByteRange& r : live) {
    if (r.begin >= r.end) continue;
    const uint64_t begin = r.begin / kKvFilePage * kKvFilePage;
    const uint64_t end = (r.end + kKvFilePage - 1) / kKvFilePage * kKvFilePage;
    if (!spans.empty() && begin <= spans.back().end) {
      spans.back().end = end;
    } else {
      spans.push_back({begin, end});
    }
  }
  return spans;
}

}  // namespace longkv
