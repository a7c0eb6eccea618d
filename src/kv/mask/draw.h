// What a mask or gates keep, layers by heads.
#pragma once

#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "longkv/status.h"

namespace longkv {

struct KeptShares {
  std::string title;  // of a picture
  std::string unit;   // what is counted
  int layers = 0, kv_heads = 0;
  int64_t whole = 1;         // of a head
  std::vector<double> kept;  // [layers][kv_heads], of `whole`
};

// Whether the file is a sidecar that longkv knows: a channel mask or head gates.
bool holds_learned(const GgufFile& file);
// Errors: kCorrupt, kUnsupported.
Result<KeptShares> read_kept_shares(const GgufFile& file);

// A line per layer with a bar and the number kept for every KV head.
std::string draw_shares(const KeptShares& shares);

}  // namespace longkv
