// Whether the build holds code for the present card.
#include "cuda/launch.cuh"

namespace longkv {

namespace {
__global__ void empty_kernel() {}
}  // namespace

Status kernels_fit_card() {
  cudaFuncAttributes attributes{};
  return cuda_status(cudaFuncGetAttributes(&attributes, empty_kernel), "looking for code for the card");
}

namespace card {

bool cards_overlap_kernels() {
  static const bool overlap = [] {
    int device = 0, major = 0;
    cudaFuncAttributes attributes{};
    // Not binaryVersion: the driver makes code for a card of 9.0 out of what was compiled for an older one, too.
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9 &&
           cudaFuncGetAttributes(&attributes, empty_kernel) == cudaSuccess && attributes.ptxVersion >= 90;
  }();
  return overlap;
}

}  // namespace card

}  // namespace longkv
