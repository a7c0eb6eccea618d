// Channel masks learned once per model (LeanK, arXiv 2508.02215): which K channels old rows keep, or which products of
// K with learned directions.
//
// Files:
//   GGUF      our sidecar, kv.leank.*: version 1 holds factors per channel, version 2 also directions, what stands for
//             heads without channels, and whether the mean of what keys lost is added back
//   .pth      a tensor [layers][kv_heads][head_dim] as torch.save writes it (zip; nothing in it is executed), the form
//             the authors publish masks
//   text      one line per layer, kv_heads * head_dim numbers
// A channel's value is 0 (dropped) or what multiplies it in the old rows (1 in published masks).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "kv/region_store.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

struct LeankMask {
  std::vector<HeadMask> heads;  // [layers][kv_heads]
  int64_t sink = 0;             // with which it was learned; 0: unknown
  int64_t window = 0;
  bool compensate = false;  // RegionSpec
  std::string model;        // its identity (model/identity.h), or its name alone; empty: unknown
};

// A mask with the shape that it was made for.
struct LeankSidecar {
  int layers = 0, kv_heads = 0, dim_k = 0;
  LeankMask mask;
};

// Errors: kIo, kCorrupt, kInvalidArgument when no file is named or the mask is not for a model of this shape.
Result<LeankMask> load_leank(const std::string& path, const KvShape& shape);

bool is_leank_sidecar(const GgufFile& file);
// Errors: kCorrupt, kUnsupported (a later version).
Result<LeankSidecar> read_leank_sidecar(const GgufFile& file);
// Errors: kIo, kInvalidArgument.
Status save_leank_sidecar(const std::string& path, const KvShape& shape, const LeankMask& mask);

// The factors of a mask of channels, [layers][kv_heads][dim_k]; 0: dropped. Errors: kUnsupported for directions.
Result<std::vector<float>> channel_factors(const LeankMask& mask, int64_t dim_k);
// A mask from such factors.
LeankMask mask_of_factors(const std::vector<float>& factors, int64_t dim_k);

}  // namespace longkv
