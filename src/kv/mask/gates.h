// Gates of KV heads learned once per model (DuoAttention, arXiv 2410.10819): how much a head needs old rows.
//
// Files:
//   GGUF   our sidecar, kv.duo.*: with the model that they were learned for and the windows
//   text   the authors' full_attention_heads.tsv: a line per layer, a gate per KV head
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

struct DuoGates {
  int layers = 0, kv_heads = 0;
  std::vector<double> values;  // [layers][kv_heads]
  int64_t sink = 0;            // with which they were learned; 0: unknown
  int64_t window = 0;
  std::string model;  // its identity; empty: unknown
};

// Errors: kIo, kCorrupt, kUnsupported (a later version), kInvalidArgument when the gates are not for a model of this
// shape or of another identity than `model`, where both are known.
Result<DuoGates> load_gates(const std::string& path, const KvShape& shape, const std::string& model);

bool is_gates_sidecar(const GgufFile& file);
Result<DuoGates> read_gates_sidecar(const GgufFile& file);
Status save_gates_sidecar(const std::string& path, const DuoGates& gates);

// Heads that do without old rows when `share` of all does: those with the lowest gates, ties by their order.
std::vector<bool> streaming_heads(const std::vector<double>& gates, double share);

// The authors' form.
std::string gates_table(const DuoGates& gates);

}  // namespace longkv
