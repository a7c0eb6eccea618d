#include "kv/keep/keep.h"

#include "base/error.h"
#include "kv/keep/kinds.h"

namespace longkv {

Result<std::unique_ptr<Keeper>> make_keeper(const KeepSpec& spec, const KvShape& shape, const std::string& model) {
  switch (spec.kind) {
    case KeepKind::kFastgen: return make_fastgen(spec, shape);
    case KeepKind::kAll: return std::unique_ptr<Keeper>();
    case KeepKind::kStreaming: return make_streaming(spec, shape);
    case KeepKind::kKnorm: return make_knorm(spec, shape);
    case KeepKind::kKeydiff: return make_keydiff(spec, shape);
    case KeepKind::kRandom: return make_random(spec, shape);
    case KeepKind::kSnapkv: return make_snapkv(spec, shape);
    case KeepKind::kPyramidkv: return make_pyramidkv(spec, shape);
    case KeepKind::kTova: return make_tova(spec, shape);
    case KeepKind::kH2o: return make_h2o(spec, shape);
    case KeepKind::kExpectedAttention: return make_expected_attention(spec, shape);
    case KeepKind::kAdakv: return make_adakv(spec, shape);
    case KeepKind::kDuo: return make_duo(spec, shape, model);
    case KeepKind::kAsymkv: return make_asymkv(spec, shape);
    case KeepKind::kNormmass:
    case KeepKind::kKvslimmer: return make_merging(spec, shape);
    case KeepKind::kKvzip: return make_kvzip(spec, shape);
  }
  return fail(Code::kInternal, "keep={} has no keeper", keep_kind_name(spec.kind));
}

}  // namespace longkv
