#include "cuda/card_chunk_ops.h"

#include <algorithm>

#include "cuda/card_plan.h"

namespace longkv {

namespace {
constexpr int64_t kTileBytes = int64_t(128) << 20;       // of weights as halves
constexpr int64_t kProductBytes = int64_t(256) << 20;    // of the activations of one product
constexpr int64_t kAttentionBytes = int64_t(768) << 20;  // scores, their gradient and what surrounds them
constexpr int64_t kGramRows = 8;                         // of a chunk, of which channels are weighed together
}  // namespace

int64_t card_learn_bytes(const ModelConfig& c, int64_t context, int64_t tokens) {
  const int64_t rows = context * c.kv_heads * (c.head_dim_k + c.head_dim_v) * 4;
  const int64_t queries = tokens * c.heads * (4 * c.head_dim_k + 3 * c.head_dim_v) * 4;
  const int64_t channels =
      int64_t(c.kv_heads) * (c.head_dim_k + 1) * kGramRows * (c.dim + 2 * c.heads / c.kv_heads * c.head_dim_v) * 4;
  const int64_t grams = channels + int64_t(c.dim) * c.heads * c.head_dim_v * 4 + (int64_t(128) << 20);
  // Scores of the chunk's own rows and their gradient are never cut.
  const int64_t own = 2 * int64_t(c.heads) * tokens * std::max<int64_t>(tokens, 64) * 4;
  const int64_t attention = std::max(kAttentionBytes, own + kProductBytes);
  return kTileBytes + kProductBytes + attention + kCardGemmWorkspace + rows + queries + grams;
}

}  // namespace longkv

#ifdef LONGKV_WITH_CUDA

#include <cstring>
#include <map>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/card_model_impl.h"
#include "cuda/carver.h"
#include "cuda/channel_gram.h"
#include "cuda/channels.h"
#include "cuda/chunk.h"
#include "cuda/chunk_attend.h"
#include "cuda/prompt_rows.h"

namespace longkv {

namespace {

class CardChunkOps final : public ChunkOps {
 public:
  CardChunkOps(std::shared_ptr<CardModel> card, ThreadPool& pool)
      : card_(std::move(card)), pool_(pool), cpu_(make_cpu_chunk_ops(pool, ProductType::kF32)) {}
  ~CardChunkOps() override { (void)cudaStreamSynchronize(stream_.get()); }
  Status open();

  Status multiply(std::span<const Product> products, const float* x, int64_t tokens) override;
  Status multiply_backward(std::span<const Gradient> gradients, int64_t tokens, float* dx) override;
  Status attend(const ChunkAttention& a, float* out, float* lse) override { return attention_->attend(a, out, lse); }
  Status attend_backward(const ChunkAttention& a, const float* out, const float* lse, const float* dout,
                         const ChunkAttentionGradient& gradient) override {
    return attention_->backward(a, out, lse, dout, gradient);
  }
  Status channel_grams(const ChunkAttention& a, const ChannelGramInputs& inputs, double* grams) override;
  void forget(uint64_t prompt_id) override { rows_->forget(prompt_id); }

 private:
  // Buffers of a product of `tokens` rows: `in` values a row come, `out` go.
  struct Buffers {
    float *in, *out, *scale;
    card::half_t *halves, *tile;
    float* pair;
  };
  template <class Part>
  const CardStack* stack_of(std::span<const Part> parts) const;
  Result<Buffers> reserve(int64_t tokens, int64_t in, int64_t out, const CardStack& stack);
  // visit(weights as halves [n][cols], first row, n) for all rows of a stack.
  template <class Visit>
  Status each_tile(const CardStack& stack, const Buffers& b, const Visit& visit);
  Status send(const Buffers& b, int64_t tokens, int64_t in);
  Status fetch(const Buffers& b, int64_t tokens, int64_t out);
  static int64_t tokens_at_once(const CardStack& s) {
    return std::max<int64_t>(16, kProductBytes / ((s.rows + s.cols) * 4 * 3));
  }

  std::shared_ptr<CardModel> card_;
  ThreadPool& pool_;
  std::unique_ptr<ChunkOps> cpu_;  // for matrices that lie in memory
  CardStream stream_;
  std::unique_ptr<CardGemm> gemm_;
  std::unique_ptr<CardPromptRows> rows_;
  std::unique_ptr<CardChunkAttention> attention_;
  std::unique_ptr<CardChannelGrams> grams_;
  std::map<const Weight*, const CardStack*> stacks_;  // by their first matrix
  CardBuffer memory_;
  PinnedBuffer host_;
};

Status CardChunkOps::open() {
  CardModel::Impl& m = card_->impl();
  LONGKV_TRY(cuda_status(cudaSetDevice(m.card.index), "choosing the card"));
  LONGKV_ASSIGN(stream_, CardStream::create());
  LONGKV_ASSIGN(gemm_, CardGemm::create(*m.memory));
  rows_ = std::make_unique<CardPromptRows>(*m.memory, stream_.get(), pool_);
  attention_ = std::make_unique<CardChunkAttention>(*rows_, *gemm_, stream_.get(), pool_);
  grams_ = std::make_unique<CardChannelGrams>(*rows_, *gemm_, stream_.get(), pool_);
  for (size_t i = size_t(m.host_layers); i < m.layers.size(); ++i) {
    for (const CardStack* s : m.layers[i].all()) stacks_[s->sources.front()] = s;
  }
  stacks_[m.output.sources.front()] = &m.output;
  return {};
}

template <class Part>
const CardStack* CardChunkOps::stack_of(std::span<const Part> parts) const {
  const auto found = parts.empty() ? stacks_.end() : stacks_.find(parts.front().w);
  if (found == stacks_.end()) return nullptr;
  const std::vector<const Weight*>& sources = found->second->sources;
  const bool same = std::equal(sources.begin(), sources.end(), parts.begin(), parts.end(),
                               [](const Weight* w, const Part& p) { return w == p.w; });
  return same ? found->second : nullptr;
}

Result<CardChunkOps::Buffers> CardChunkOps::reserve(int64_t tokens, int64_t in, int64_t out, const CardStack& s) {
  const int64_t tile_rows = std::min(s.rows, std::max<int64_t>(64, kTileBytes / (s.cols * 2)));
  Buffers b{};
  const auto lay = [&](Carver c) {
    b.in = c.take<float>(tokens * in);
    b.out = c.take<float>(tokens * out);
    b.scale = c.take<float>(tokens);
    b.halves = c.take<card::half_t>(2 * tokens * in);
    b.pair = c.take<float>(2 * tokens * out);
    b.tile = c.take<card::half_t>(tile_rows * s.cols);
    return c.used();
  };
  LONGKV_TRY(rows_->grow(memory_, lay(Carver(nullptr)), fmt::format("products of a chunk of {} tokens", tokens)));
  lay(Carver(memory_.data()));
  const int64_t bytes = tokens * std::max(in, out) * 4;
  if (host_.bytes() < bytes) {
    host_ = PinnedBuffer();
    LONGKV_ASSIGN(host_, PinnedBuffer::create(bytes, "staging of a chunk"));
  }
  return b;
}

template <class Visit>
Status CardChunkOps::each_tile(const CardStack& stack, const Buffers& b, const Visit& visit) {
  const int64_t tile_rows = std::max<int64_t>(64, kTileBytes / (stack.cols * 2));
  int64_t row = 0;
  for (const CardMatrix& m : stack.parts) {
    for (int64_t first = 0; first < m.rows; first += tile_rows) {
      const int64_t n = std::min(tile_rows, m.rows - first);
      const auto* w = reinterpret_cast<const card::half_t*>(m.low) + first * m.cols;
      if (m.type != TensorType::kF16) {
        LONGKV_TRY(card::decode_matrix(m, first, n, b.tile, stream_.get()));
        w = b.tile;
      }
      LONGKV_TRY(visit(w, row + first, n));
    }
    row += m.rows;
  }
  return {};
}

// What lies in host_, as pairs of halves.
Status CardChunkOps::send(const Buffers& b, int64_t tokens, int64_t in) {
  LONGKV_TRY(cuda_status(
      cudaMemcpyAsync(b.in, host_.as<float>(), size_t(tokens * in) * 4, cudaMemcpyHostToDevice, stream_.get()),
      "activations of a chunk"));
  return card::split_rows(b.in, tokens, in, b.halves, b.scale, stream_.get());
}

Status CardChunkOps::fetch(const Buffers& b, int64_t tokens, int64_t out) {
  LONGKV_TRY(card::join_rows(b.pair, b.scale, tokens, out, b.out, stream_.get()));
  LONGKV_TRY(cuda_status(
      cudaMemcpyAsync(host_.as<float>(), b.out, size_t(tokens * out) * 4, cudaMemcpyDeviceToHost, stream_.get()),
      "products of a chunk"));
  return stream_.wait("products of a chunk");
}

Status CardChunkOps::multiply(std::span<const Product> products, const float* x, int64_t tokens) {
  const CardStack* stack = stack_of(products);
  if (stack == nullptr) return cpu_->multiply(products, x, tokens);
  const int64_t cols = stack->cols, rows = stack->rows, most = tokens_at_once(*stack);
  for (int64_t begin = 0; begin < tokens; begin += most) {
    const int64_t n = std::min(most, tokens - begin);
    LONGKV_ASSIGN(const Buffers b, reserve(n, cols, rows, *stack));
    pool_.run(n, [&](int64_t t, int) { std::copy_n(x + (begin + t) * cols, cols, host_.as<float>() + t * cols); });
    LONGKV_TRY(send(b, n, cols));
    LONGKV_TRY(each_tile(*stack, b, [&](const card::half_t* w, int64_t first, int64_t count) {
      CardProduct p{2 * n, count, cols, false, true, cols, cols, rows};
      p.halves = true;
      return gemm_->run(p, b.halves, w, b.pair + first, stream_.get());
    }));
    LONGKV_TRY(fetch(b, n, rows));
    pool_.run(n, [&](int64_t t, int) {
      const float* from = host_.as<float>() + t * rows;
      for (const Product& p : products) {
        std::copy_n(from, p.w->rows, p.y + (begin + t) * p.w->rows);
        from += p.w->rows;
      }
    });
  }
  return {};
}

Status CardChunkOps::multiply_backward(std::span<const Gradient> gradients, int64_t tokens, float* dx) {
  const CardStack* stack = stack_of(gradients);
  if (stack == nullptr) return cpu_->multiply_backward(gradients, tokens, dx);
  const int64_t cols = stack->cols, rows = stack->rows, most = tokens_at_once(*stack);
  for (int64_t begin = 0; begin < tokens; begin += most) {
    const int64_t n = std::min(most, tokens - begin);
    LONGKV_ASSIGN(const Buffers b, reserve(n, rows, cols, *stack));
    pool_.run(n, [&](int64_t t, int) {
      float* to = host_.as<float>() + t * rows;
      for (const Gradient& g : gradients) to = std::copy_n(g.dy + (begin + t) * g.w->rows, g.w->rows, to);
    });
    LONGKV_TRY(send(b, n, rows));
    LONGKV_TRY(each_tile(*stack, b, [&](const card::half_t* w, int64_t first, int64_t count) {
      CardProduct p{2 * n, cols, count, false, false, rows, cols, cols};
      p.halves = true;
      p.add = first > 0;
      return gemm_->run(p, b.halves + first, w, b.pair, stream_.get());
    }));
    LONGKV_TRY(fetch(b, n, cols));
    pool_.run(n, [&](int64_t t, int) {
      const float* from = host_.as<float>() + t * cols;
      float* to = dx + (begin + t) * cols;
      for (int64_t i = 0; i < cols; ++i) to[i] += from[i];
    });
  }
  return {};
}

Status CardChunkOps::channel_grams(const ChunkAttention& a, const ChannelGramInputs& inputs, double* grams) {
  const Product wo[] = {{inputs.wo, nullptr}};
  const CardStack* stack = stack_of(std::span<const Product>(wo));
  if (stack == nullptr) return cpu_->channel_grams(a, inputs, grams);
  return grams_->run(
      a, inputs,
      [&](float* to) -> Status {
        LONGKV_ASSIGN(const Buffers b, reserve(1, stack->cols, stack->rows, *stack));
        return each_tile(*stack, b, [&](const card::half_t* w, int64_t first, int64_t count) {
          return card::widen_halves(w, count * stack->cols, to + first * stack->cols, stream_.get());
        });
      },
      grams);
}

}  // namespace

Result<std::unique_ptr<ChunkOps>> make_card_chunk_ops(std::shared_ptr<CardModel> card, ThreadPool& pool) {
  auto ops = std::make_unique<CardChunkOps>(std::move(card), pool);
  LONGKV_TRY(ops->open());
  return std::unique_ptr<ChunkOps>(std::move(ops));
}

}  // namespace longkv

#else

namespace longkv {

// NOLINTNEXTLINE(performance-unnecessary-value-param): kept by the build with a card
Result<std::unique_ptr<ChunkOps>> make_card_chunk_ops(std::shared_ptr<CardModel>, ThreadPool&) {
  return cuda_cards().status();
}

}  // namespace longkv

#endif
