// The transformer block over the card's operators: counterpart of model/graph.h. Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/card_model_impl.h"
#include "cuda/card_old.h"
#include "cuda/card_sparse.h"
#include "cuda/kv.h"
#include "cuda/layer_feed.h"
#include "cuda/ops.h"

namespace longkv {

// Buffers and layers of one sequence. Work is queued on the stream that every call names.
class CardGraph {
 public:
  // `chunk`: prompt tokens that a layer takes at a time.
  static Result<std::unique_ptr<CardGraph>> create(std::shared_ptr<CardModel> model, int64_t context, int64_t chunk);
  // Bytes of VRAM whatever the chunk.
  static int64_t fixed_bytes(const CardModel& model, int64_t context);
  // Bytes of VRAM for chunks of that many tokens.
  static int64_t chunk_bytes(const ModelConfig& c, int64_t chunk);

  // --- one token: the residual stream is hidden(), its position lies on the card
  float* hidden() const { return token_.hidden; }
  int64_t* position() const { return token_.position; }  // then: decoded tokens; where encoded rows end
  float* logits() const { return token_.logits; }
  const card::half_t* query() const { return token_.q; }  // after qkv_token()
  const float* token_qkv() const { return token_.qkv; }   // ... without a cache on the card: rotated
  const float* chunk_qkv() const { return chunk_.qkv; }   // the same after prefill_layer()
  // Attention that was computed elsewhere: [heads * dim] in pinned memory, for finish_token().
  Status take_attention(const float* out, cudaStream_t stream);
  Status begin_token(cudaStream_t stream);  // angles of the position
  // row: on the card, where the token's row lies among those of kv; nullptr: at its position.
  Status qkv_token(int layer, const card::CardKv& kv, cudaStream_t stream, const card::BlockStore& store = {},
                   const int32_t* slot_of = nullptr, const int64_t* row = nullptr);
  Status attend_token(int layer, const card::CardKv& kv, const card::TileList& list, cudaStream_t stream,
                      const int64_t* row = nullptr);
  Status attend_token(int layer, const CardOldRows& rows, const card::TileList& list, cudaStream_t stream);
  Status finish_token(int layer, cudaStream_t stream);
  // Logits of one hidden row.
  Status output(const float* hidden, cudaStream_t stream);

  // --- chunks of a prompt
  // Prompts are read sparsely from now on.
  Status read_sparsely(const PrefillSpec& spec, int64_t context, int64_t chunk);
  CardSparse* sparse() const { return sparse_.get(); }  // nullptr: prompts are read densely
  // Before the chunks of a layer whose rows [0, start) are in `rows` (f16).
  Status begin_rows(int layer, const card::CardKv& rows, int64_t start, cudaStream_t stream);
  // Weights of a layer as halves, for the chunks that follow; they come from memory where they lie there.
  Status load_layer(int layer, cudaStream_t stream);
  // Angles of n positions from `first` on.
  Status begin_chunk(int64_t first, int64_t n, cudaStream_t stream);
  // hidden[n][dim] is replaced. Rows go to kv and, where given, to `work`, which is then what is attended.
  // prompt_end: where the prompt ends, for sparse reading. dropped: tokens before `first` that have no rows; a row's
  // place is so much less than its position.
  Status prefill_layer(int layer, const card::CardKv& kv, const card::CardKv* work, float* hidden, int64_t first,
                       int64_t n, int64_t prompt_end, cudaStream_t stream, int64_t dropped = 0);

 private:
  CardGraph() = default;
  Status allocate(int64_t context, int64_t chunk);
  Status rope(const RopeConfig& config, int64_t context, card::CardRope& out, CardBuffer& memory);
  Status products(const CardStack& stack, const card::half_t* weights, const card::half_t* x, int64_t n, bool add,
                  float* y, cudaStream_t stream);
  Status matvec(const CardStack& stack, const card::CardRow& x, const float* bias, bool add, float* y,
                cudaStream_t stream);
  const ModelConfig& config() const { return model_->model().config(); }
  const CardLayer& layer(int i) const { return model_->impl().layers[size_t(i)]; }
  const card::CardRope& rope_of(const CardLayer& l) const { return l.window_rope ? rope_window_ : rope_; }
  card::AttendArgs attend_args(const CardLayer& l, const card::CardKv& kv, const card::half_t* q) const;
  card::AppendArgs append_args(const CardLayer& l, const card::CardKv& kv) const;

  std::shared_ptr<CardModel> model_;
  std::unique_ptr<CardGemm> gemm_;
  std::unique_ptr<CardSparse> sparse_;
  std::unique_ptr<LayerFeed> feed_;  // where layers lie in memory
  card::CardRope rope_, rope_window_;
  CardBuffer rope_memory_, rope_window_memory_, token_memory_, chunk_memory_, weight_memory_;

  struct Token {
    float *hidden, *qkv, *attention, *gate_up, *proj, *logits, *angles, *angles_window;
    int64_t* position;
    card::half_t *q, *old_q;  // old_q, shift: as encoded rows under a mask meet them
    float* shift;
    card::CardRow row, ff;
    card::DecodeScratch scratch;
  } token_{};
  struct Chunk {
    float *qkv, *gate_up, *proj, *row_scale, *angles, *angles_window;
    int64_t* first;  // position of the chunk's first token; its row where that is another
    card::half_t *norm, *q, *attention, *act;
  } chunk_{};
  struct Weights {
    card::half_t *qkv, *o, *gate_up, *down;
  } weights_{};
};

}  // namespace longkv
