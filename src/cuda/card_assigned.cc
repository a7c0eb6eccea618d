// MInference's patterns on a card, one for each query head: columns and diagonals, a window, or blocks of 64.
#ifdef LONGKV_WITH_CUDA

#include <algorithm>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/card_pattern.h"
#include "cuda/carver.h"
#include "cuda/prompt_blocks.h"
#include "cuda/prompt_lines.h"
#include "prefill/assignment.h"

namespace longkv {

namespace {

class CardAssigned final : public CardPattern {
 public:
  explicit CardAssigned(const CardPatternShape& shape)
      : c_(*shape.config), spec_(shape.spec), group_(c_.heads / c_.kv_heads) {
    const bool from_file = assigns_by_file(spec_);
    has_lines_ = spec_.kind != PrefillKind::kBlockSparse;
    samples_ = has_lines_ && spec_.kind != PrefillKind::kAShape;
    has_blocks_ = from_file || !has_lines_;
    rows_ = round_up(shape.context, 64);
    const int64_t of_query_head = kSlashQueries * rows_ * 4;
    kv_batch_ = std::min<int64_t>(kPatternScoreBytes / (of_query_head * group_), c_.kv_heads);
    head_batch_ = kv_batch_ > 0 ? group_ : std::clamp<int64_t>(kPatternScoreBytes / of_query_head, 1, group_);
    key_blocks_ = round_up(ceil_div(shape.context, card::kPromptBlock), 64);
    query_blocks_ = shape.chunk / card::kPromptBlock + 2;  // a chunk may begin and end within a block
    lists_.most = from_file ? key_blocks_ : std::min(spec_.blocks, key_blocks_);
  }

  int64_t lay(Carver carver) {
    const int64_t heads = c_.heads, dim = c_.head_dim_k;
    patterns_ = carver.take<card::HeadLines>(c_.layers * heads);
    ids_ = carver.take<int32_t>(c_.layers * heads);
    sizes_ = carver.take<int32_t>(c_.layers * heads);
    if (has_lines_) {
      lines_.words = rows_ / 64;
      lines_.columns = carver.take<uint64_t>(heads * lines_.words);
      lines_.distances = carver.take<uint64_t>(heads * lines_.words);
      lines_.spread = carver.take<uint64_t>(heads * 3 * lines_.words);
    }
    if (samples_) {
      sample_ = carver.take<card::half_t>(heads * kSlashQueries * dim);
      stats_ = carver.take<float>(2 * heads * kSlashQueries);
      sample_scores_ = carver.take<float>(std::max<int64_t>(1, kv_batch_) * head_batch_ * kSlashQueries * rows_);
      columns_ = carver.take<float>(heads * rows_);
      distances_ = carver.take<float>(heads * rows_);
    }
    if (has_blocks_) {
      key_means_ = carver.take<card::half_t>(c_.kv_heads * key_blocks_ * dim);
      query_means_ = carver.take<card::half_t>(heads * query_blocks_ * dim);
      block_scores_ = carver.take<float>(heads * query_blocks_ * key_blocks_);
      lists_.blocks = carver.take<int32_t>(heads * query_blocks_ * lists_.most);
      lists_.count = carver.take<int32_t>(heads * query_blocks_);
    }
    return carver.used();
  }

  Status allocate(CardMemory& memory) {
    LONGKV_ASSIGN(const PatternAssignment assignment, assignment_of(spec_, c_.layers, c_.heads));
    LONGKV_ASSIGN(memory_, CardBuffer::create(memory, lay(Carver(nullptr)), "estimates of sparse reading"));
    lay(Carver(memory_.data()));
    return send(assignment);
  }

  Status begin_layer(int layer, const card::CardKv& kv, int64_t start, cudaStream_t stream) override {
    if (layers_[size_t(layer)].blocks == 0) return {};
    return card::pool_keys(kv, 0, start, key_blocks_, key_means_, stream);
  }

  Status attend(int layer, const CardPatternChunk& chunk, CardGemm& gemm, cudaStream_t stream) override {
    const LayerHeads& l = layers_[size_t(layer)];
    const int32_t* ids = ids_ + int64_t(layer) * c_.heads;
    const card::PromptHeads lines{ids, l.lines + l.fixed}, blocks{ids + l.lines + l.fixed, l.blocks};
    if (lines.count > 0) {
      const card::HeadLines* patterns = patterns_ + int64_t(layer) * c_.heads;
      LONGKV_TRY(card::begin_lines(lines, patterns, lines_, stream));
      if (l.lines > 0) LONGKV_TRY(choose_lines({ids, l.lines}, patterns, chunk, gemm, stream));
      LONGKV_TRY(card::spread_lines(lines, {chunk.first, chunk.sparse}, lines_, stream));
      LONGKV_TRY(card::attend_prompt_lines(chunk.attend, lines, lines_, chunk.first, chunk.sparse, chunk.out,
                                           chunk.pairs, stream));
    }
    if (blocks.count == 0) return {};
    card::PromptLists lists = lists_;
    lists.heads = blocks;
    LONGKV_TRY(choose_blocks(lists, layer, chunk, gemm, stream));
    return card::attend_prompt_listed(chunk.attend, lists, chunk.first, chunk.sparse, chunk.out, chunk.pairs, stream);
  }

 private:
  // Query heads of a layer in the order of ids_.
  struct LayerHeads {
    int lines = 0;   // whose lines are chosen
    int fixed = 0;   // whose lines are given
    int blocks = 0;  // that attend lists of blocks
  };

  Status send(const PatternAssignment& assignment) {
    const size_t all = size_t(c_.layers) * size_t(c_.heads);
    std::vector<card::HeadLines> patterns;
    std::vector<int32_t> ids, sizes(all, 0);
    for (const auto& heads : assignment) {
      LayerHeads& l = layers_.emplace_back();
      const auto list = [&](card::LineKind kind, int& count) {
        for (int h = 0; h < c_.heads; ++h) {
          if (pattern_of(heads[size_t(h)]).kind != kind) continue;
          ids.push_back(h);
          ++count;
        }
      };
      list(card::LineKind::kLines, l.lines);
      list(card::LineKind::kAShape, l.fixed);
      list(card::LineKind::kAll, l.fixed);
      list(card::LineKind::kBlocks, l.blocks);
      for (const HeadPattern& p : heads) {
        if (p.kind == PrefillKind::kBlockSparse)
          sizes[patterns.size()] = int32_t(std::clamp<int64_t>(p.first, 1, lists_.most));
        patterns.push_back(pattern_of(p));
      }
    }
    const auto copy = [](void* to, const auto& from) {
      return cuda_status(cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
                         "patterns of heads");
    };
    LONGKV_TRY(copy(patterns_, patterns));
    LONGKV_TRY(copy(ids_, ids));
    return copy(sizes_, sizes);
  }

  static card::HeadLines pattern_of(const HeadPattern& p) {
    switch (p.kind) {
      case PrefillKind::kVerticalSlash: return {card::LineKind::kLines, p.first, p.second};
      case PrefillKind::kAShape: return {card::LineKind::kAShape, p.first, p.second};
      case PrefillKind::kBlockSparse: return {card::LineKind::kBlocks, p.first, 0};
      default: return {card::LineKind::kAll, 0, 0};
    }
  }

  // The columns and diagonals that the chunk's last queries give most mass.
  Status choose_lines(const card::PromptHeads& heads, const card::HeadLines* patterns, const CardPatternChunk& chunk,
                      CardGemm& gemm, cudaStream_t stream) {
    const card::AttendArgs& a = chunk.attend;
    const card::CardKv& kv = a.kv;
    const int queries = int(std::min<int64_t>(kSlashQueries, chunk.n));
    const int64_t end = chunk.first + chunk.n;
    LONGKV_TRY(card::gather_sample(a.q, a.heads, kv.dim, chunk.n, queries, sample_, stream));
    // Few shapes to choose an algorithm for. What lies past the last row is not read.
    const int64_t keys = std::min({kv.capacity, rows_, round_up(end, 4096)}), batch = std::max<int64_t>(1, kv_batch_);
    for (int64_t kv_head = 0; kv_head < kv.kv_heads; kv_head += batch) {
      const int64_t count = std::min(batch, kv.kv_heads - kv_head);
      for (int64_t j = 0; j < group_; j += head_batch_) {
        const int64_t of_group = std::min(head_batch_, group_ - j), first = kv_head * group_ + j;
        const PatternProduct product{of_group * queries,   keys, kv.dim, count, group_ * queries * kv.dim,
                                     kv.capacity * kv.dim, rows_};
        LONGKV_TRY(pattern_product(gemm, product, sample_ + first * queries * kv.dim,
                                   reinterpret_cast<const card::half_t*>(kv.k) + kv_head * kv.capacity * kv.dim,
                                   sample_scores_, stream));
        const card::SampleScores scores{sample_scores_, rows_,    int(count * of_group), queries, end - queries,
                                        a.scale,        a.softcap};
        LONGKV_TRY(card::sample_mass(scores, stats_, columns_ + first * rows_, distances_ + first * rows_, stream));
      }
    }
    return card::choose_lines(columns_, distances_, rows_, end, heads, patterns, lines_, stream);
  }

  // For each block of queries the blocks of keys whose mean its own mean query scores best; its own block always.
  Status choose_blocks(card::PromptLists& lists, int layer, const CardPatternChunk& chunk, CardGemm& gemm,
                       cudaStream_t stream) {
    const card::AttendArgs& a = chunk.attend;
    const int64_t first = chunk.first, n = chunk.n, dim = a.kv.dim;
    LONGKV_TRY(card::pool_keys(a.kv, first, n, key_blocks_, key_means_, stream));
    LONGKV_TRY(card::pool_queries(a.q, a.heads, a.kv.dim, first, n, query_means_, stream));
    lists.query_blocks = card::prompt_blocks(first, n);
    const int64_t keys = std::min(key_blocks_, round_up(ceil_div(first + n, card::kPromptBlock), 64));
    const PatternProduct product{
        group_ * lists.query_blocks, keys,       dim, a.kv.kv_heads, group_ * lists.query_blocks * dim,
        key_blocks_ * dim,           key_blocks_};
    LONGKV_TRY(pattern_product(gemm, product, query_means_, key_means_, block_scores_, stream));
    return card::choose_prompt_blocks(block_scores_, key_blocks_, a.heads, first, lists,
                                      sizes_ + int64_t(layer) * c_.heads, stream);
  }

  const ModelConfig& c_;
  PrefillSpec spec_;
  int64_t group_;
  bool has_lines_ = false, samples_ = false, has_blocks_ = false;
  int64_t rows_ = 0;                       // of a prompt, rounded
  int64_t kv_batch_ = 0, head_batch_ = 1;  // KV heads whose scores are held at once (0: less than one), heads of each
  int64_t key_blocks_ = 0, query_blocks_ = 0;  // of a head
  std::vector<LayerHeads> layers_;
  CardBuffer memory_;
  card::HeadLines* patterns_ = nullptr;        // [layers][heads]
  int32_t *ids_ = nullptr, *sizes_ = nullptr;  // [layers][heads]
  card::PromptLines lines_;
  card::half_t *sample_ = nullptr, *key_means_ = nullptr, *query_means_ = nullptr;
  float *stats_ = nullptr, *sample_scores_ = nullptr, *columns_ = nullptr, *distances_ = nullptr;
  float* block_scores_ = nullptr;
  card::PromptLists lists_;
};

}  // namespace

int64_t card_assigned_bytes(const CardPatternShape& shape) { return CardAssigned(shape).lay(Carver(nullptr)); }

Result<std::unique_ptr<CardPattern>> make_card_assigned(CardMemory& memory, const CardPatternShape& shape) {
  auto pattern = std::make_unique<CardAssigned>(shape);
  LONGKV_TRY(pattern->allocate(memory));
  return std::unique_ptr<CardPattern>(std::move(pattern));
}

}  // namespace longkv

#endif
