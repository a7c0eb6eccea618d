// XAttention on a card: blocks of 128 by sums of antidiagonals.
#ifdef LONGKV_WITH_CUDA

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/card_pattern.h"
#include "cuda/carver.h"
#include "cuda/prompt_shares.h"

namespace longkv {

namespace {

class CardXAttention final : public CardPattern {
 public:
  explicit CardXAttention(const CardPatternShape& shape) : c_(*shape.config), spec_(shape.spec) {
    key_blocks_ = round_up(ceil_div(shape.context, kShareBlock), 64);
    key_squares_ = key_blocks_ * (kShareBlock / spec_.stride);
    // A chunk may begin and end within a square and a block.
    squares_ = shape.chunk / spec_.stride + 2;
    query_blocks_ = shape.chunk / kShareBlock + 2;
    const int64_t of_head = c_.heads / c_.kv_heads * squares_ * key_squares_ * 4;
    batch_ = std::clamp<int64_t>(kPatternScoreBytes / of_head, 1, c_.kv_heads);
  }

  int64_t lay(Carver carver) {
    folded_ = carver.take<card::half_t>(c_.heads * squares_ * spec_.stride * c_.head_dim_k);
    scores_ = carver.take<float>(batch_ * (c_.heads / c_.kv_heads) * squares_ * key_squares_);
    shares_ = carver.take<float>(c_.heads * query_blocks_ * key_blocks_);
    lists_.blocks = carver.take<int32_t>(c_.heads * query_blocks_ * key_blocks_);
    lists_.count = carver.take<int32_t>(c_.heads * query_blocks_);
    lists_.most = key_blocks_;
    lists_.block = kShareBlock;
    return carver.used();
  }

  Status allocate(CardMemory& memory) {
    if (spec_.shared && key_blocks_ > card::kMostUnited) {
      return fail(Code::kUnsupported, "prefill=xattention(shared=true) over more than {} tokens on a card",
                  card::kMostUnited * kShareBlock);
    }
    LONGKV_ASSIGN(memory_, CardBuffer::create(memory, lay(Carver(nullptr)), "estimates of sparse reading"));
    lay(Carver(memory_.data()));
    return {};
  }

  Status begin_layer(int, const card::CardKv&, int64_t, cudaStream_t) override { return {}; }

  Status attend(int, const CardPatternChunk& chunk, CardGemm& gemm, cudaStream_t stream) override {
    const card::AttendArgs& a = chunk.attend;
    const card::CardKv& kv = a.kv;
    const card::Squares squares{int(spec_.stride), chunk.first, chunk.n};
    const int group = a.heads / kv.kv_heads;
    const int64_t count = squares.count(), depth = spec_.stride * kv.dim;
    LONGKV_TRY(card::clear_square(kv, squares, stream));
    LONGKV_TRY(card::fold_queries(a.q, a.heads, kv.dim, squares, folded_, stream));
    card::PromptLists lists = lists_;
    lists.query_blocks = squares.query_blocks();
    // Few shapes to choose an algorithm for. What lies past the last square is not read.
    const int64_t keys = std::min({kv.capacity / spec_.stride, key_squares_, round_up(squares.keys(), 256)});
    for (int head = 0; head < kv.kv_heads; head += int(batch_)) {
      const int heads = std::min(int(batch_), kv.kv_heads - head);
      const PatternProduct product{group * count,        keys,        depth, heads, group * count * depth,
                                   kv.capacity * kv.dim, key_squares_};
      LONGKV_TRY(pattern_product(gemm, product, folded_ + head * group * count * depth,
                                 reinterpret_cast<const card::half_t*>(kv.k) + head * kv.capacity * kv.dim, scores_,
                                 stream));
      LONGKV_TRY(card::block_shares(scores_, key_squares_, heads * group, squares, a.scale,
                                    shares_ + head * group * lists.query_blocks * key_blocks_, key_blocks_, stream));
    }
    const card::ShareRules rules{spec_.share, ceil_div(spec_.sink, int64_t(kShareBlock)), spec_.min_blocks};
    LONGKV_TRY(card::choose_shares(shares_, key_blocks_, a.heads, chunk.first, rules, lists, stream));
    if (spec_.shared && group > 1) LONGKV_TRY(card::unite_lists(kv.kv_heads, group, lists, stream));
    // Blocks of queries are counted as in the whole chunk; those of the sparse part are the first.
    return card::attend_prompt_listed(a, lists, chunk.first, chunk.sparse, chunk.out, chunk.pairs, stream);
  }

 private:
  const ModelConfig& c_;
  PrefillSpec spec_;
  int64_t key_blocks_ = 0, key_squares_ = 0, squares_ = 0, query_blocks_ = 0;
  int64_t batch_ = 1;  // KV heads whose products are held at once
  CardBuffer memory_;
  card::half_t* folded_ = nullptr;
  float *scores_ = nullptr, *shares_ = nullptr;
  card::PromptLists lists_;
};

}  // namespace

int64_t card_xattention_bytes(const CardPatternShape& shape) { return CardXAttention(shape).lay(Carver(nullptr)); }

Result<std::unique_ptr<CardPattern>> make_card_xattention(CardMemory& memory, const CardPatternShape& shape) {
  auto pattern = std::make_unique<CardXAttention>(shape);
  LONGKV_TRY(pattern->allocate(memory));
  return std::unique_ptr<CardPattern>(std::move(pattern));
}

}  // namespace longkv

#endif
