#ifdef LONGKV_WITH_CUDA

#include "cuda/card_sparse.h"

#include <algorithm>

namespace longkv {

bool CardSparse::supports(PrefillKind kind) {
  switch (kind) {
    case PrefillKind::kAShape:
    case PrefillKind::kVerticalSlash:
    case PrefillKind::kBlockSparse:
    case PrefillKind::kMInference:
    case PrefillKind::kXAttention: return true;
    default: return false;
  }
}

int64_t CardSparse::bytes(const ModelConfig& c, const PrefillSpec& spec, int64_t context, int64_t chunk) {
  const CardPatternShape shape{&c, spec, context, chunk};
  return 256 + (spec.kind == PrefillKind::kXAttention ? card_xattention_bytes(shape) : card_assigned_bytes(shape));
}

Result<std::unique_ptr<CardSparse>> CardSparse::create(CardMemory& memory, const ModelConfig& config,
                                                       const PrefillSpec& spec, int64_t context, int64_t chunk) {
  std::unique_ptr<CardSparse> sparse(new CardSparse(config, spec));
  const CardPatternShape shape{&config, spec, context, chunk};
  LONGKV_ASSIGN(sparse->pattern_, spec.kind == PrefillKind::kXAttention ? make_card_xattention(memory, shape)
                                                                        : make_card_assigned(memory, shape));
  LONGKV_ASSIGN(sparse->counted_, CardBuffer::create(memory, 256, "counter of a prompt"));
  return sparse;
}

bool CardSparse::applies(int layer, int64_t prompt_end) const {
  return prompt_end >= spec_.threshold && layer >= spec_.dense_layers &&
         (config_.window.empty() || config_.window[size_t(layer)] == 0);
}

Status CardSparse::attend(int layer, const card::AttendArgs& a, int64_t first, int64_t n, int64_t prompt_end,
                          CardGemm& gemm, card::half_t* out, cudaStream_t stream) {
  const int64_t sparse = std::clamp<int64_t>(prompt_end - spec_.last - first, 0, n);
  const int64_t row = int64_t(a.heads) * a.kv.dim;
  if (sparse > 0) {
    // The estimate also sees the chunk's dense queries: they follow the sparse ones most closely.
    LONGKV_TRY(pattern_->attend(layer, {a, first, n, sparse, out, counted_.as<unsigned long long>()}, gemm, stream));
    pairs_.causal += a.heads * (sparse * first + sparse * (sparse + 1) / 2);
  }
  if (sparse == n) return {};
  count_dense(0, first + sparse, n - sparse);
  card::AttendArgs rest = a;
  rest.q += sparse * row;
  return card::attend_prompt(rest, first + sparse, n - sparse, out + sparse * row, stream);
}

Status CardSparse::begin_prompt(cudaStream_t stream) {
  pairs_ = {};
  return cuda_status(cudaMemsetAsync(counted_.data(), 0, sizeof(unsigned long long), stream), "counter of a prompt");
}

void CardSparse::count_dense(int64_t window, int64_t first, int64_t n) {
  // Rows before `edge` see all before them, the others `window`.
  const int64_t edge = window > 0 ? std::clamp(window - 1, first, first + n) : first + n, all = edge - first;
  const int64_t pairs = config_.heads * (all * first + all * (all + 1) / 2 + (first + n - edge) * window);
  pairs_.attended += pairs;
  pairs_.causal += pairs;
}

Result<PrefillPairs> CardSparse::pairs(cudaStream_t stream) {
  unsigned long long counted = 0;
  LONGKV_TRY(cuda_status(cudaMemcpyAsync(&counted, counted_.data(), sizeof(counted), cudaMemcpyDeviceToHost, stream),
                         "counter of a prompt"));
  LONGKV_TRY(cuda_status(cudaStreamSynchronize(stream), "counter of a prompt"));
  return PrefillPairs{pairs_.attended + int64_t(counted), pairs_.causal};
}

}  // namespace longkv

#endif
