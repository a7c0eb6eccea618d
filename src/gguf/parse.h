// One GGUF file in memory: header, key-value pairs and tensor records, every number bounded before it is used.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gguf/gguf.h"
#include "gguf/metadata.h"
#include "longkv/status.h"

namespace longkv {

struct GgufShard {
  uint32_t version = 0;
  Metadata metadata;                // views into `bytes`
  std::vector<TensorInfo> tensors;  // pointers into `bytes`
};

// `bytes` must outlive the result. Errors: kCorrupt, kUnsupported. No allocation is larger than a small multiple of
// the bytes that were really there.
Result<GgufShard> parse_gguf(std::span<const uint8_t> bytes);

}  // namespace longkv
