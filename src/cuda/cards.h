// Graphics cards that this build can use.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "longkv/status.h"

namespace longkv {

struct CudaCard {
  int index = 0;  // as CUDA counts
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;  // open_card() asks
};

// At least one card, by what the driver says of them: none is opened. Errors: kUnsupported that says why there is none
// (built without CUDA, no driver, driver too old, no card that the build has code for).
Result<std::vector<CudaCard>> cuda_cards();

// Makes the card the calling thread's and sees that it answers. What CUDA sets up there (some hundred MiB) stays for
// the rest of the program, so only cards that are used are opened. Errors: as cuda_cards(); there is no such card.
Result<CudaCard> open_card(int index);

// Whether code for the architectures `archs` (as LONGKV_CUDA_ARCHS names them: 90, 120a, 86-real, ...) may run on a
// card of that compute capability. Words that it does not know may do.
bool card_code_fits(std::string_view archs, int major, int minor);

// "CUDA 13.0 for sm_90", or "no CUDA".
std::string cuda_build();

}  // namespace longkv
