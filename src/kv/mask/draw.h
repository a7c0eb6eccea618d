// A channel mask for people: which heads keep how much.
#pragma once

#include <string>

#include "gguf/gguf.h"

namespace longkv {

// True when the file holds a channel mask (kv/mask/leank.h).
bool holds_channel_mask(const GgufFile& file);

// A line per layer, a number of kept channels per KV head with a bar of its share, and totals. Ends with a newline.
// Errors: kCorrupt when the tensor and the sizes that the file states disagree.
Result<std::string> draw_channel_mask(const GgufFile& file);

}  // namespace longkv
