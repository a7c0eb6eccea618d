// The key-value section of a GGUF file.
#pragma once

#include <cstdint>

#include "gguf/cursor.h"
#include "gguf/metadata.h"
#include "longkv/status.h"

namespace longkv {

// Reads `count` pairs at the cursor. Errors: kCorrupt.
Result<Metadata> parse_metadata(Cursor& cursor, uint64_t count);

}  // namespace longkv
