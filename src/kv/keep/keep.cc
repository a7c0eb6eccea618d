#include "kv/keep/keep.h"

#include "base/error.h"
#include "kv/keep/kinds.h"

namespace longkv {

Result<std::unique_ptr<Keeper>> make_keeper(const KeepSpec& spec, const KvShape& shape) {
  switch (spec.kind) {
    case KeepKind::kAll: return std::unique_ptr<Keeper>();
    case KeepKind::kStreaming: return make_streaming(spec, shape);
    default: break;
  }
  return fail(Code::kInternal, "keep={} has no keeper", keep_kind_name(spec.kind));
}

}  // namespace longkv
