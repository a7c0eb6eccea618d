#ifdef LONGKV_WITH_CUDA

#include "cuda/card_index.h"

#include <algorithm>

#include "base/checked.h"
#include "kv/select/coarse.h"

namespace longkv {

namespace {
card::SummaryKind summary_kind(const IndexSpec& index) {
  if (index.kind == IndexKind::kMean) return card::SummaryKind::kMean;
  return index.eight ? card::SummaryKind::kBox8 : card::SummaryKind::kBox;
}
}  // namespace

bool CardIndex::supports(const IndexSpec& index, const SelectSpec& select, const ModelConfig& c) {
  if (select.heads == SelectHeads::kPerQueryHead || index.block % 16 != 0 || c.head_dim_k == 96 ||
      c.heads / c.kv_heads > 16) {
    return false;
  }
  if (select.mode == SelectMode::kTopP) {
    // Candidates that one block of threads weighs, and the exact keys, which are those that the card has.
    card::ChoiceRules rules;
    rules.blocks = ceil_div(select.candidates, index.block);
    rules.sink = select.sink;
    rules.local = select.local;
    if (select.refine != Refine::kExact || select.heads != SelectHeads::kPerKvHead || index.coarse > 1 ||
        !(select.p < 1) || rules.tiles(int(index.block)) > card::MassScratch::kMostTiles)
      return false;
  }
  const bool masses = select.aggregate == Aggregate::kSoftmaxSum;
  if (index.kind == IndexKind::kBits) return masses && index.width == 0 && !index.pool_max;
  return !masses && (index.kind == IndexKind::kMinMax || (index.kind == IndexKind::kMean && !index.eight));
}

Result<std::unique_ptr<CardIndex>> CardIndex::create(CardMemory& memory, const ModelConfig& c, const Recipe& r,
                                                     int64_t capacity, int first_layer) {
  std::unique_ptr<CardIndex> index(new CardIndex(c));
  index->by_bits_ = r.index.kind == IndexKind::kBits;
  index->block_ = int(r.index.block);
  index->rules_ = {r.select.budget, r.select.sink, r.select.local, r.select.heads == SelectHeads::kShared,
                   r.select.aggregate == Aggregate::kMax};
  const int block = index->block_;
  if (r.select.mode == SelectMode::kTopP) {
    index->p_ = r.select.p;
    index->rules_.blocks = ceil_div(r.select.candidates, block);
  }
  const int64_t blocks = round_up(ceil_div(capacity, block), 8);  // scores of a head begin at wide words
  const auto kind = summary_kind(r.index);
  const int64_t per_layer = round_up(index->by_bits_ ? card::bits_bytes(block, c.kv_heads, c.head_dim_k, blocks)
                                                     : card::summary_bytes(kind, c.kv_heads, c.head_dim_k, blocks),
                                     256);
  int64_t choosing = 0;
  for (int l = 0; l < c.layers; ++l) {
    index->chooses_.push_back(l >= std::max(first_layer, r.select.dense_layers) &&
                              (c.window.empty() || c.window[size_t(l)] == 0));
    choosing += index->chooses_.back();
  }
  LONGKV_ASSIGN(index->memory_, CardBuffer::create(memory, choosing * per_layer, "the index of the KV blocks"));
  uint8_t* at = index->memory_.data();
  for (int l = 0; l < c.layers; ++l) {
    index->boxes_.push_back(
        card::place_summaries(kind, block, c.kv_heads, c.head_dim_k, blocks, index->by_bits_ ? nullptr : at));
    index->bits_.push_back(
        card::place_bits(block, c.kv_heads, c.head_dim_k, blocks, r.index.rotate, r.index.unbiased, at));
    if (index->chooses_[size_t(l)]) at += per_layer;
  }
  LONGKV_ASSIGN(index->scores_,
                CardBuffer::create(memory, card::score_bytes(c.kv_heads, blocks), "scores of the KV blocks"));
  if (index->by_bits_) {
    LONGKV_ASSIGN(index->mass_memory_,
                  CardBuffer::create(memory, card::BitsScratch::bytes(c.heads, c.kv_heads, block, blocks),
                                     "masses of the KV blocks"));
    index->masses_ = card::BitsScratch::at(index->mass_memory_.data(), c.heads);
  }
  card::TileList& list = index->list_;
  list.stride = index->rules_.tiles(block);
  LONGKV_ASSIGN(index->tiles_, CardBuffer::create(memory, c.kv_heads * (list.stride * 8 + 4), "chosen rows"));
  list.tiles = index->tiles();
  list.count = list.tiles + c.kv_heads * list.stride * 2;
  if (index->by_mass()) {
    LONGKV_ASSIGN(index->token_memory_,
                  CardBuffer::create(memory, card::MassScratch::bytes(c.heads, c.kv_heads, list.stride),
                                     "weights of candidate rows"));
    index->mass_ = card::MassScratch::at(index->token_memory_.data(), c.heads, c.kv_heads, list.stride);
    list.marks = index->mass_.marks;
    LONGKV_TRY(cuda_status(cudaMemset(index->token_memory_.data(), 0, 16), "counters"));
  }
  if (r.index.coarse > 1 && !index->by_bits_) LONGKV_TRY(index->create_coarse(memory, r, capacity));
  return index;
}

// The second level, where the recipe asks for one by number: the same kind of summary over `coarse` blocks each.
Status CardIndex::create_coarse(CardMemory& memory, const Recipe& r, int64_t capacity) {
  const ModelConfig& c = config_;
  const auto kind = summary_kind(r.index);
  const int factor = int(r.index.coarse), block = block_ * factor;
  const int64_t blocks = round_up(ceil_div(capacity, block), 8);
  KvShape head;
  head.dim_k = c.head_dim_k;
  limits_ = {index_limit(r.index, head, r.select.budget * 2 * kv_row_bytes(r.store.k, c.head_dim_k)),
             card::summary_bytes(kind, 1, c.head_dim_k, 1), card::summary_bytes(kind, 1, c.head_dim_k, 1), block_};
  const int64_t per_layer = round_up(card::summary_bytes(kind, c.kv_heads, c.head_dim_k, blocks), 256);
  const int64_t choosing = std::count(chooses_.begin(), chooses_.end(), true);
  LONGKV_ASSIGN(coarse_memory_, CardBuffer::create(memory, choosing * per_layer, "the coarse index of the KV blocks"));
  uint8_t* at = coarse_memory_.data();
  for (int l = 0; l < c.layers; ++l) {
    coarse_.push_back(card::place_summaries(kind, block, c.kv_heads, c.head_dim_k, blocks, at));
    if (chooses_[size_t(l)]) at += per_layer;
  }
  card::Candidates& among = rules_.among;
  among.stride = limits_.most(rules_, factor);
  const int64_t score_bytes = c.kv_heads * blocks * 4;
  LONGKV_ASSIGN(coarse_lists_, CardBuffer::create(memory, score_bytes + c.kv_heads * (among.stride + 1) * 4,
                                                  "candidates among the KV blocks"));
  among.factor = factor;
  among.coarse = reinterpret_cast<const int32_t*>(coarse_lists_.data() + score_bytes);
  among.count = among.coarse + c.kv_heads * among.stride;
  return {};
}

// The arithmetic of choice.cuh. A chosen block may share some rows with sinks and tail: they are counted twice.
int64_t CardIndex::rows_attended(int64_t tokens) const {
  if (by_mass()) return 0;  // counters() tell
  if (tokens <= rules_.budget) return tokens;
  const int64_t sink = std::min(rules_.sink, tokens);
  const int64_t tail = std::max(sink, std::min(tokens - std::max<int64_t>(rules_.local, 1), tokens / block_ * block_));
  const int64_t left = std::max<int64_t>(1, rules_.budget - sink - (tokens - tail));
  const int64_t blocks = tail > sink ? ceil_div(tail, block_) - sink / block_ : 0;
  return std::min(tokens, sink + std::min(std::max<int64_t>(1, left / block_), blocks) * block_ + tokens - tail);
}

// Blocks of a list that are scored.
int64_t CardIndex::most_candidates(int64_t tokens) const {
  const int64_t fine = tokens / block_;
  if (coarse_.empty() || fine * limits_.block_bytes <= limits_.index_bytes) return fine;
  const int64_t factor = rules_.among.factor, most = std::min(limits_.most(rules_, int(factor)), fine / factor);
  return std::min(fine, most * factor + fine % factor);
}

CardChoiceStep CardIndex::step_at(int64_t tokens) const {
  CardChoiceStep step;
  step.all = !by_mass() && tokens <= rules_.budget;
  if (by_bits_) return step;
  step.ends = tokens % block_ == 0;
  step.sieves = !step.all && most_candidates(tokens) > card::kFewBlocks;
  return step;
}

int64_t CardIndex::scan_bytes(int64_t tokens) const {
  if (!coarse_.empty()) {
    const int64_t factor = rules_.among.factor, coarse = tokens / (block_ * factor), fine = tokens / block_;
    const int64_t scored = fine * limits_.block_bytes <= limits_.index_bytes ? fine : coarse + most_candidates(tokens);
    return config_.kv_heads * scored * limits_.block_bytes;
  }
  if (by_bits_) return card::bits_bytes(block_, config_.kv_heads, config_.head_dim_k, tokens / block_);
  return card::summary_bytes(boxes_[0].kind, config_.kv_heads, config_.head_dim_k, tokens / block_);
}

Status CardIndex::update(int layer, const card::CardKv& kv, int64_t begin, int64_t end, cudaStream_t stream) const {
  if (!selects(layer)) return {};
  if (by_bits_) return card::write_bits(kv, bits_[size_t(layer)], begin, end - begin, stream);
  LONGKV_TRY(card::summarize(kv, boxes_[size_t(layer)], begin / block_, end / block_ - begin / block_, stream));
  if (coarse_.empty()) return {};
  const card::CardSummaries& coarse = coarse_[size_t(layer)];
  return card::summarize(kv, coarse, begin / coarse.block, end / coarse.block - begin / coarse.block, stream);
}

// The token's row, and summaries of the blocks that end with it.
Status CardIndex::index_last(int layer, const CardChoiceStep& step, const card::CardKv& kv,
                             const card::BlockStore& store, const int64_t* position, cudaStream_t stream) const {
  const bool far = store.data != nullptr;
  if (by_bits_) {
    const card::CardBits& bits = bits_[size_t(layer)];
    return far ? card::write_bits_last(store, bits, position, stream)
               : card::write_bits_last(kv, bits, position, stream);
  }
  if (!step.ends) return {};
  for (const auto* level : {&boxes_, &coarse_}) {
    if (level->empty()) continue;
    const card::CardSummaries& boxes = (*level)[size_t(layer)];
    LONGKV_TRY(far ? card::summarize_last(store, boxes, position, stream)
                   : card::summarize_last(kv, boxes, position, stream));
  }
  return {};
}

// Coarse blocks first: those whose blocks are scored at all.
Status CardIndex::choose_candidates(int layer, const card::half_t* query, const card::CardKv& kv,
                                    const int64_t* position, cudaStream_t stream) const {
  const card::CardSummaries& coarse = coarse_[size_t(layer)];
  auto* scores = coarse_lists_.as<float>();
  card::ChoiceRules all = rules_;
  all.among = {};
  LONGKV_TRY(card::score_blocks(query, config_.heads, kv, coarse, all, position, scores, stream));
  return card::choose_coarse(scores, config_.kv_heads, coarse, all, limits_, position,
                             const_cast<int32_t*>(rules_.among.coarse), const_cast<int32_t*>(rules_.among.count),
                             rules_.among.stride, stream);
}

Result<card::TileList> CardIndex::choose(int layer, const CardChoiceStep& step, const card::half_t* query,
                                         const card::CardKv& kv, const card::BlockStore& store, const int64_t* position,
                                         cudaStream_t stream) const {
  const card::CardSummaries& boxes = boxes_[size_t(layer)];
  auto* scores = scores_.as<float>();
  LONGKV_TRY(index_last(layer, step, kv, store, position, stream));
  if (step.all) return card::TileList();
  card::Tops tops = step.sieves ? card::Tops::kMade : card::Tops::kNone;
  if (by_bits_) {
    LONGKV_TRY(card::score_bits(query, config_.heads, kv, bits_[size_t(layer)], rules_, config_.attn_scale, position,
                                masses_, scores, stream));
    tops = card::Tops::kLeft;
  } else {
    if (!coarse_.empty()) LONGKV_TRY(choose_candidates(layer, query, kv, position, stream));
    LONGKV_TRY(card::score_blocks(query, config_.heads, kv, boxes, rules_, position, scores, stream));
  }
  LONGKV_TRY(card::choose_blocks(scores, tops, config_.kv_heads, boxes, rules_, position, tiles(),
                                 const_cast<int32_t*>(list_.count), list_.stride, stream));
  if (by_mass()) {
    const card::AttendArgs a{query, config_.heads, kv, config_.attn_scale, config_.attn_softcap};
    LONGKV_TRY(card::choose_mass(a, rules_, block_, p_, position, tiles(), const_cast<int32_t*>(list_.count),
                                 list_.stride, mass_, stream));
  }
  return list_;
}

}  // namespace longkv

#endif
