// The prefill stage of a recipe: decides per layer and chunk what is read densely and what by a pattern.
#pragma once

#include <memory>
#include <vector>

#include "kv/types.h"
#include "longkv/status.h"
#include "prefill/attention.h"
#include "prefill/pattern.h"
#include "prefill/spec.h"

namespace longkv {

class SparsePrefill {
 public:
  // Reads the assignment file. Errors: those of load_assignment.
  static Result<std::unique_ptr<SparsePrefill>> create(const PrefillSpec& spec, const KvShape& shape);

  // Whether chunks of this layer use the pattern in a prompt that ends before `prompt_end`.
  bool applies(int layer, int64_t prompt_end) const;
  // Attention of a chunk for which applies() holds: the last rows of the prompt, and those that mass is wanted from,
  // attend everything.
  PrefillPairs run(const PrefillAttendArgs& args, int layer, int64_t prompt_end, PrefillAttention& attention,
                   ThreadPool& pool);

  // Prompt tokens to read at a time so that a pattern's estimate pays.
  static int64_t chunk_tokens(const PrefillSpec& spec, int64_t chunk, int64_t context);

 private:
  SparsePrefill(const PrefillSpec& spec, const KvShape& shape) : spec_(spec), shape_(shape) {}

  PrefillSpec spec_;
  KvShape shape_;
  std::unique_ptr<PrefillPattern> pattern_;  // none: everything is dense
  std::vector<int64_t> first_rows_;          // scratch: [kv_heads]
};

}  // namespace longkv
