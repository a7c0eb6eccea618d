#include "prefill/sparse.h"

#include <algorithm>

#include "base/error.h"
#include "prefill/assignment.h"

namespace longkv {

Result<std::unique_ptr<SparsePrefill>> SparsePrefill::create(const PrefillSpec& spec, const KvShape& shape) {
  if (spec.kind != PrefillKind::kDense && spec.dense_layers >= shape.layers) {
    return fail(Code::kInvalidArgument,
                "prefill: dense_layers={} leaves none of the model's {} layers to the pattern; nearest legal: "
                "dense_layers={}, or prefill=dense",
                spec.dense_layers, shape.layers, shape.layers - 1);
  }
  auto stage = std::unique_ptr<SparsePrefill>(new SparsePrefill(spec, shape));
  const int heads = shape.kv_heads * shape.group_size;
  switch (spec.kind) {
    case PrefillKind::kDense: break;
    case PrefillKind::kFlex: stage->pattern_ = make_flex_pattern(spec); break;
    case PrefillKind::kXAttention: stage->pattern_ = make_xattention_pattern(spec); break;
    case PrefillKind::kMInference:
    case PrefillKind::kAShape:
    case PrefillKind::kVerticalSlash:
    case PrefillKind::kBlockSparse: {
      LONGKV_ASSIGN(PatternAssignment assignment, assignment_of(spec, shape.layers, heads));
      stage->pattern_ = make_assigned_pattern(std::move(assignment));
      break;
    }
  }
  return stage;
}

bool SparsePrefill::applies(int layer, int64_t prompt_end) const {
  return pattern_ != nullptr && prompt_end >= spec_.threshold && layer >= spec_.dense_layers &&
         shape_.window_of(layer) == 0;
}

PrefillPairs SparsePrefill::run(const PrefillAttendArgs& args, int layer, int64_t prompt_end,
                                PrefillAttention& attention, ThreadPool& pool) {
  int64_t dense_from = prompt_end - spec_.last;
  if (args.mass != nullptr) dense_from = std::min(dense_from, args.mass_from);
  const int64_t sparse = std::clamp<int64_t>(dense_from - args.first_position, 0, args.tokens);
  PrefillPairs pairs;
  if (sparse > 0) {
    // The estimate also sees the chunk's dense queries: they follow the sparse ones most closely.
    pattern_->estimate(args, layer, pool);
    PrefillAttendArgs part = args;
    part.tokens = sparse;
    part.mass = nullptr;
    pairs = attention.run_listed(part, *pattern_);
  }
  if (sparse == args.tokens) return pairs;
  const int64_t query_heads = int64_t(args.heads.size()) * args.group_size;
  PrefillAttendArgs part = args;
  part.q += sparse * query_heads * args.heads[0].dim_k;
  part.out += sparse * query_heads * args.heads[0].dim_v;
  part.first_position += sparse;
  first_rows_.assign(args.first_rows.begin(), args.first_rows.end());
  for (int64_t& row : first_rows_) row += sparse;
  part.first_rows = first_rows_;
  part.tokens -= sparse;
  attention.run(part);
  const int64_t dense = dense_pairs(part);
  return {pairs.attended + dense, pairs.causal + dense};
}

int64_t SparsePrefill::chunk_tokens(const PrefillSpec& spec, int64_t chunk, int64_t context) {
  return spec.kind == PrefillKind::kDense || context < spec.threshold ? chunk : std::max(chunk, spec.chunk);
}

}  // namespace longkv
