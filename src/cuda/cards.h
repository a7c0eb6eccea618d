// Graphics cards that this build can use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longkv/status.h"

namespace longkv {

struct CudaCard {
  int index = 0;  // as CUDA counts
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
};

// At least one card. Errors: kUnsupported that says why there is none (built without CUDA, no driver, driver too old,
// no card that the build has code for).
Result<std::vector<CudaCard>> cuda_cards();

// "CUDA 13.0 for sm_90", or "no CUDA".
std::string cuda_build();

}  // namespace longkv
