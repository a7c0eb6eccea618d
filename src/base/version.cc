#include "base/version.h"

namespace longkv {

const char* version() { return LONGKV_VERSION; }
const char* build_commit() { return LONGKV_COMMIT; }
const char* build_compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

}  // namespace longkv
