// LeanK (arXiv 2508.02215): a static mask of K channels per layer and KV head, learned once per checkpoint.
//
// Files, by content:
//   GGUF      our sidecar: kv.leank.version (1), kv.leank.layers, kv.leank.kv_heads, kv.leank.head_dim, optional
//             kv.leank.sink and kv.leank.window (those of training), optional kv.leank.model (what the mask was learned
//             for), tensor kv.leank.alpha f32 [head_dim, kv_heads, layers]
//   zip       a tensor saved by torch.save, float [layers][kv_heads][head_dim], or a list of them per layer: how
//             the authors publish masks
//   text      one line per layer, kv_heads * head_dim numbers
// A channel's value is 0 (dropped) or what multiplies it in the old rows (1 in published masks).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kv/region_store.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

struct LeankMask {
  std::vector<HeadMask> heads;  // [layers][kv_heads]
  int64_t sink = 0;             // with which it was learned; 0: unknown
  int64_t window = 0;
  std::string model;  // empty: unknown
};

// Errors: kIo, kCorrupt, kInvalidArgument when no file is named or the mask is not for a model of this shape.
Result<LeankMask> load_leank(const std::string& path, const KvShape& shape);
// Our sidecar; alpha: [layers][kv_heads][dim_k]. Errors: kIo, kInvalidArgument.
Status save_leank(const std::string& path, const KvShape& shape, const std::vector<float>& alpha, int64_t sink,
                  int64_t window, const std::string& model);

}  // namespace longkv
