#include "cuda/cards.h"

#include "base/error.h"

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
      continue;
    }
    CudaCard card{i, p.name, p.major, p.minor, p.multiProcessorCount, int64_t(p.totalGlobalMem), 0};
    size_t free = 0, total = 0;
    Status ready = cuda_status(cudaSetDevice(i), "opening the card");
    if (ready.ok()) ready = kernels_fit_card();
    if (ready.ok()) ready = cuda_status(cudaMemGetInfo(&free, &total), "asking for free memory");
    if (!ready.ok()) {
      refused = fmt::format("{}: {}", p.name, ready.message());
      continue;
    }
    card.free_bytes = int64_t(free);
    cards.push_back(std::move(card));
  }
  if (cards.empty()) return Status(Code::kUnsupported, refused);
  return cards;
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
std::string cuda_build() { return "no CUDA"; }

}  // namespace longkv

#endif
