#ifdef LONGKV_WITH_CUDA

#include "cuda/card_sparse.h"

#include <algorithm>

#include "base/checked.h"

namespace longkv {

namespace {

struct Sizes {
  int64_t key_blocks, query_blocks;                        // of a head
  int64_t key_means, query_means, scores, blocks, counts;  // bytes, rounded
  int64_t all() const { return key_means + query_means + scores + blocks + counts; }
};
Sizes sizes_of(const ModelConfig& c, const PrefillSpec& spec, int64_t context, int64_t chunk) {
  Sizes s{};
  s.key_blocks = round_up(ceil_div(context, card::kPromptBlock), 64);
  s.query_blocks = chunk / card::kPromptBlock + 2;  // a chunk may begin and end within a block
  s.key_means = round_up(c.kv_heads * s.key_blocks * c.head_dim_k * 2, 256);
  s.query_means = round_up(c.heads * s.query_blocks * c.head_dim_k * 2, 256);
  s.scores = round_up(c.heads * s.query_blocks * s.key_blocks * 4, 256);
  s.blocks = round_up(c.heads * s.query_blocks * spec.blocks * 4, 256);
  s.counts = round_up(c.heads * s.query_blocks * 4, 256);
  return s;
}

}  // namespace

int64_t CardSparse::bytes(const ModelConfig& c, const PrefillSpec& spec, int64_t context, int64_t chunk) {
  return sizes_of(c, spec, context, chunk).all();
}

Result<std::unique_ptr<CardSparse>> CardSparse::create(CardMemory& memory, const ModelConfig& config,
                                                       const PrefillSpec& spec, int64_t context, int64_t chunk) {
  std::unique_ptr<CardSparse> sparse(new CardSparse(config, spec));
  const Sizes s = sizes_of(config, spec, context, chunk);
  LONGKV_ASSIGN(sparse->memory_, CardBuffer::create(memory, s.all(), "estimates of block-sparse reading"));
  uint8_t* at = sparse->memory_.data();
  const auto take = [&](int64_t bytes) { return std::exchange(at, at + bytes); };
  sparse->capacity_ = s.key_blocks;
  sparse->key_means_ = reinterpret_cast<card::half_t*>(take(s.key_means));
  sparse->query_means_ = reinterpret_cast<card::half_t*>(take(s.query_means));
  sparse->scores_ = reinterpret_cast<float*>(take(s.scores));
  sparse->lists_.blocks = reinterpret_cast<int32_t*>(take(s.blocks));
  sparse->lists_.count = reinterpret_cast<int32_t*>(take(s.counts));
  sparse->lists_.most = spec.blocks;
  return sparse;
}

bool CardSparse::applies(int layer, int64_t prompt_end) const {
  return prompt_end >= spec_.threshold && layer >= spec_.dense_layers &&
         (config_.window.empty() || config_.window[size_t(layer)] == 0);
}

Status CardSparse::begin_layer(const card::CardKv& kv, int64_t start, cudaStream_t stream) {
  return card::pool_keys(kv, 0, start, capacity_, key_means_, stream);
}

Status CardSparse::attend(const card::AttendArgs& a, int64_t first, int64_t n, int64_t prompt_end, CardGemm& gemm,
                          card::half_t* out, cudaStream_t stream) {
  // The estimate also sees the chunk's dense queries, and its keys serve the chunks that follow.
  LONGKV_TRY(card::pool_keys(a.kv, first, n, capacity_, key_means_, stream));
  const int64_t sparse = std::clamp<int64_t>(prompt_end - spec_.last - first, 0, n);
  const int64_t row = int64_t(a.heads) * a.kv.dim;
  if (sparse > 0) {
    LONGKV_TRY(card::pool_queries(a.q, a.heads, a.kv.dim, first, n, query_means_, stream));
    card::PromptLists lists = lists_;
    lists.query_blocks = card::prompt_blocks(first, n);
    // Products of whole sets of 64 blocks: fewer shapes to choose an algorithm for. What lies past the end is not read.
    const int64_t blocks = std::min(capacity_, round_up(ceil_div(first + n, card::kPromptBlock), 64));
    const int64_t rows = a.heads / a.kv.kv_heads * lists.query_blocks;
    for (int h = 0; h < a.kv.kv_heads; ++h) {
      LONGKV_TRY(gemm.run(query_means_ + h * rows * a.kv.dim, key_means_ + h * capacity_ * a.kv.dim, rows, blocks,
                          a.kv.dim, false, scores_ + h * rows * capacity_, capacity_, stream));
    }
    LONGKV_TRY(card::choose_prompt_blocks(scores_, capacity_, a.heads, first, lists, stream));
    // Query blocks are counted as in the whole chunk; those of the sparse part are the first.
    LONGKV_TRY(card::attend_prompt_listed(a, lists, first, sparse, out, stream));
  }
  if (sparse == n) return {};
  card::AttendArgs rest = a;
  rest.q += sparse * row;
  return card::attend_prompt(rest, first + sparse, n - sparse, out + sparse * row, stream);
}

}  // namespace longkv

#endif
