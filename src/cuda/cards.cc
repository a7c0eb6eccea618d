#include "cuda/cards.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"

namespace longkv {

bool card_code_fits(std::string_view archs, int major, int minor) {
  const int card = 10 * major + minor;
  while (!archs.empty()) {
    const std::string_view word = archs.substr(0, archs.find_first_of(" ;"));
    archs.remove_prefix(std::min(archs.size(), word.size() + 1));
    int arch = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), arch);
    if (error != std::errc()) {
      if (!word.empty()) return true;  // all, native: what that was, the build does not say
      continue;
    }
    const std::string_view rest = word.substr(size_t(end - word.data()));
    const bool exact = rest.starts_with('a'), family = rest.starts_with('f');
    const bool machine = arch / 10 == major && arch <= card;  // code of the arch itself, for cards of its kind
    const bool text = arch <= card;                           // PTX, for all that came later
    if (exact ? arch == card : family ? machine : rest == "-real" ? machine : text) return true;
  }
  return false;
}

}  // namespace longkv

#ifdef LONGKV_WITH_CUDA

#include "cuda/runtime.h"

namespace longkv {

Result<std::vector<CudaCard>> cuda_cards() {
  int driver = 0, count = 0;
  // Without a driver the version reads 0; the count alone would only say that something is missing.
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
    return fail(Code::kUnsupported, "there is no card: no NVIDIA driver is loaded");
  if (driver / 1000 < CUDART_VERSION / 1000) {
    return fail(Code::kUnsupported, "the NVIDIA driver is for CUDA {}.{}; this build needs one for CUDA {} or later",
                driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000);
  }
  if (const cudaError_t e = cudaGetDeviceCount(&count); e != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return fail(Code::kUnsupported, "no NVIDIA card is usable ({})", cudaGetErrorString(e));
  }
  std::vector<CudaCard> cards;
  std::string refused;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    if (const cudaError_t e = cudaGetDeviceProperties(&p, i); e != cudaSuccess) {
      (void)cudaGetLastError();
      refused = fmt::format("card {} does not answer ({})", i, cudaGetErrorString(e));
    } else if (!card_code_fits(LONGKV_CUDA_ARCHS, p.major, p.minor)) {
      refused = fmt::format("{}: this build has no code for this card (LONGKV_CUDA_ARCHS)", p.name);
    } else {
      cards.push_back({i, p.name, p.major, p.minor, p.multiProcessorCount, int64_t(p.totalGlobalMem), 0});
    }
  }
  if (cards.empty()) return Status(Code::kUnsupported, refused);
  return cards;
}

Result<CudaCard> open_card(int index) {
  LONGKV_ASSIGN(std::vector<CudaCard> cards, cuda_cards());
  const auto card = std::find_if(cards.begin(), cards.end(), [&](const CudaCard& c) { return c.index == index; });
  if (card == cards.end()) return fail(Code::kUnsupported, "there is no usable card {}", index);
  size_t free = 0, total = 0;
  Status ready = cuda_status(cudaSetDevice(index), "opening the card");
  if (ready.ok()) ready = kernels_fit_card();
  if (ready.ok()) ready = cuda_status(cudaMemGetInfo(&free, &total), "asking for free memory");
  if (!ready.ok()) return fail(Code::kUnsupported, "{}: {}", card->name, ready.message());
  card->free_bytes = int64_t(free);
  return *std::move(card);
}

std::string cuda_build() {
  return fmt::format("CUDA {}.{} for sm_{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, LONGKV_CUDA_ARCHS);
}

}  // namespace longkv

#else

namespace longkv {

Result<std::vector<CudaCard>> cuda_cards() {
  return fail(Code::kUnsupported, "no card can be used: this build has no CUDA part");
}
Result<CudaCard> open_card(int) { return cuda_cards().status(); }
std::string cuda_build() { return "no CUDA"; }

}  // namespace longkv

#endif
