// Version and commit of this build.
#pragma once

namespace longkv {

const char* version();
const char* build_commit();
const char* build_compiler();

}  // namespace longkv
