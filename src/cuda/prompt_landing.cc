#ifdef LONGKV_WITH_CUDA

#include "cuda/prompt_landing.h"

#include <vector>

#include "base/error.h"
#include "kv/codec/codec.h"

namespace longkv {

Result<std::unique_ptr<PromptLanding>> PromptLanding::create(const ModelConfig& c, KvSession& kv, int64_t chunk,
                                                             ThreadPool& pool) {
  std::unique_ptr<PromptLanding> landing(new PromptLanding(c, kv, pool));
  const int64_t q = int64_t(c.heads) * c.head_dim_k, one = int64_t(c.kv_heads) * c.head_dim_k;
  for (Piece& p : landing->pieces_) {
    LONGKV_ASSIGN(p.memory, PinnedBuffer::create(chunk * (q + 2 * one) * 4, "rows of a prompt's chunk"));
    p.q = p.memory.as<float>();
    p.k = p.q + chunk * q;
    p.v = p.k + chunk * one;
    LONGKV_TRY(cuda_status(cudaEventCreateWithFlags(&p.done, cudaEventDisableTiming), "creating an event"));
  }
  return landing;
}

PromptLanding::~PromptLanding() {
  for (Piece& p : pieces_) {
    if (p.done == nullptr) continue;
    (void)cudaEventSynchronize(p.done);
    (void)cudaEventDestroy(p.done);
  }
}

Status PromptLanding::begin_layer(int layer, int64_t start, const card::CardKv& work, cudaStream_t stream) {
  dropped_ = 0;
  if (start == 0) return {};
  const StoreSpec& store = kv_.recipe().store;
  if (store.rotates_k() || store.rotates_v() || kv_.cache().view(layer, 0).middle != nullptr) {
    return fail(Code::kUnsupported,
                "the recipe {} holds old rows in a form that a further prompt on the card does not read; read the "
                "whole prompt at once, or without -ngl",
                kv_.recipe().canonical());
  }
  const int dim = config_.head_dim_k, heads = config_.kv_heads;
  const int64_t held = kv_.cache().view(layer, 0).rows;
  dropped_ = start - held;
  LONGKV_TRY(cuda_status(cudaStreamSynchronize(stream), "reading a prompt"));
  std::vector<uint8_t> halves(size_t(heads) * 2 * size_t(held * dim * 2));
  pool_.run(heads * 2, [&](int64_t task, int) {
    const KvHeadView view = kv_.cache().view(layer, int(task / 2));
    std::vector<float> rows(size_t(held * dim));  // zeros where a sliding window has let rows go
    float* from = rows.data() + view.first_row * dim;
    task % 2 == 0 ? decode_k_rows(view, view.first_row, held, from) : decode_v_rows(view, view.first_row, held, from);
    encode_rows(KvType::kF16, rows.data(), dim, held, dim, halves.data() + task * held * dim * 2, dim * 2);
  });
  for (int64_t task = 0; task < heads * 2; ++task) {
    uint8_t* to = (task % 2 == 0 ? work.k : work.v) + task / 2 * work.capacity * dim * 2;
    LONGKV_TRY(cuda_status(
        cudaMemcpy(to, halves.data() + task * held * dim * 2, size_t(held * dim * 2), cudaMemcpyHostToDevice),
        "rows of the cache"));
  }
  return {};
}

Status PromptLanding::chunk_layer(CardGraph& graph, int layer, const card::CardKv& work, float* hidden, int64_t first,
                                  int64_t n, int64_t end, cudaStream_t stream) {
  const ModelConfig& c = config_;
  Piece& p = pieces_[next_];
  next_ = 1 - next_;
  LONGKV_TRY(land(p));
  card::CardKv none;
  none.kv_heads = c.kv_heads;
  none.dim = c.head_dim_k;
  LONGKV_TRY(graph.prefill_layer(layer, none, &work, hidden, first, n, end, stream, dropped_));
  const int64_t q = int64_t(c.heads) * c.head_dim_k, one = int64_t(c.kv_heads) * c.head_dim_k, width = q + 2 * one;
  const auto copy = [&](float* to, int64_t column, int64_t columns) {
    return cuda_status(cudaMemcpy2DAsync(to, size_t(columns) * 4, graph.chunk_qkv() + column, size_t(width) * 4,
                                         size_t(columns) * 4, size_t(n), cudaMemcpyDeviceToHost, stream),
                       "rows of a prompt's chunk");
  };
  LONGKV_TRY(copy(p.k, q, one));
  LONGKV_TRY(copy(p.v, q + one, one));
  if (kv_.wants_queries(layer)) LONGKV_TRY(copy(p.q, 0, q));
  LONGKV_TRY(cuda_status(cudaEventRecord(p.done, stream), "rows of a prompt's chunk"));
  p.layer = layer;
  p.n = n;
  p.end = end;
  return {};
}

Status PromptLanding::land(Piece& p) {
  if (p.layer < 0) return {};
  LONGKV_TRY(cuda_status(cudaEventSynchronize(p.done), "rows of a prompt's chunk"));
  const int layer = p.layer;
  p.layer = -1;
  return kv_.observe(layer, p.q, p.k, p.v, p.n, p.end, nullptr, nullptr);
}

Status PromptLanding::end_layer(int layer, bool last) {
  LONGKV_TRY(land(pieces_[next_]));  // the older one first
  LONGKV_TRY(land(pieces_[1 - next_]));
  return last ? kv_.finish_prefill(layer) : Status();
}

Status PromptLanding::abandon(int64_t held, cudaStream_t stream) {
  (void)cudaStreamSynchronize(stream);
  for (Piece& p : pieces_) p.layer = -1;
  if (kv_.truncate(TokenCount{held}).ok()) return {};
  // Eviction has let go of rows that the shorter sequence would need.
  return kv_.truncate(TokenCount{0});
}

}  // namespace longkv

#endif
