#include "cuda/card_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/bits.h"
#include "cuda/kv.h"
#include "cuda/old.h"
#include "cuda/select.h"
#include "cuda/stack.h"
#include "kv/plan.h"
#include "kv/plan_store.h"
#include "kv/store_spec.h"

namespace longkv {

namespace {

constexpr int64_t kRounding = int64_t(4) << 20;  // of a layer's matrices in their packed form
// What a plan leaves for prompts: less makes products slow and, where layers lie in memory, lets their weights cross
// the bus more often.
constexpr int64_t kPlannedChunk = 2048, kPlannedSpan = 16384, kFullCardChunk = 512;
constexpr int64_t kHotSteps = 4;  // of a hybrid cache: blocks of so many steps stay on the card

int64_t qkv_width(const ModelConfig& c) { return int64_t(c.heads + 2 * c.kv_heads) * c.head_dim_k; }

bool chooses(const ModelConfig& c, const Recipe& r, int layer) {
  return !r.select.all && layer >= r.select.dense_layers && (c.window.empty() || c.window[size_t(layer)] == 0);
}

// Of one layer's blocks, as CardIndex holds them.
int64_t index_bytes(const ModelConfig& c, const Recipe& r, int64_t context) {
  const auto level = [&](int64_t block) {
    const int64_t blocks = round_up(ceil_div(context, block), 8);
    if (r.index.kind == IndexKind::kBits) return card::bits_bytes(int(block), c.kv_heads, c.head_dim_k, blocks);
    const auto kind = r.index.kind == IndexKind::kMean ? card::SummaryKind::kMean
                      : r.index.eight                  ? card::SummaryKind::kBox8
                                                       : card::SummaryKind::kBox;
    return card::summary_bytes(kind, c.kv_heads, c.head_dim_k, blocks);
  };
  const int64_t block = std::max<int64_t>(1, r.index.block);
  return level(block) + (r.index.coarse > 1 && r.index.kind != IndexKind::kBits ? level(block * r.index.coarse) : 0);
}

// KV rows and index of a layer on the card; kept: channels of all heads under a mask.
int64_t layer_rows(const ModelConfig& c, const CardPlanRequest& q, int layer, std::span<const int> kept) {
  if (q.rows == CardRows::kInMemory) return 0;
  const Recipe& r = q.recipe;
  const bool choosing = chooses(c, r, layer);
  const StoreRegions regions = store_regions(r.store, r.mask);
  if (regions.on && (c.window.empty() || c.window[size_t(layer)] == 0)) {
    if (!kept.empty()) kept = kept.subspan(size_t(layer) * size_t(c.kv_heads), size_t(c.kv_heads));
    return card_old_bytes(c, r, q.context, kept) + (choosing ? index_bytes(c, r, q.context) : 0);
  }
  int64_t rows = round_up(q.context, 16);
  if (choosing && q.rows == CardRows::kHybrid) {
    const int64_t step = r.select.budget + r.select.sink + r.select.local + 4 * r.index.block;
    rows = std::min(rows, round_up(kHotSteps * step, 16));
  }
  return card::card_kv_bytes(regions.raw.k, c.kv_heads, c.head_dim_k, rows) +
         (choosing ? index_bytes(c, r, q.context) : 0);
}

}  // namespace

int card_splits(int multiprocessors, int kv_heads) { return std::max(1, 2 * multiprocessors / kv_heads); }

int64_t card_old_bytes(const ModelConfig& c, const Recipe& recipe, int64_t context, std::span<const int> kept) {
  const StoreRegions regions = store_regions(recipe.store, recipe.mask);
  const int64_t steps = card::old_steps(context, regions.sink);
  int64_t bytes =
      card::card_kv_bytes(KvType::kF16, c.kv_heads, c.head_dim_k, regions.sink + card::old_ring(regions.window));
  for (int h = 0; h < c.kv_heads; ++h) {
    const int n = kept.empty() ? c.head_dim_k : card::old_kept(kept[size_t(h)]);
    if (n > 0)
      bytes += steps * (card::old_step_bytes(regions.old.k, n) + card::old_step_bytes(regions.old.v, c.head_dim_k));
  }
  return bytes;
}

int64_t card_chunk_bytes(const ModelConfig& c, int64_t chunk) {
  const int64_t width = qkv_width(c), heads = int64_t(c.heads) * c.head_dim_k;
  return chunk *
         (width * 4 + 2 * c.ff_dim * 4 + c.dim * 4 + 4 + 2 * c.rope.dim * 4 + c.dim * 2 + heads * 4 + c.ff_dim * 2);
}

int64_t card_graph_bytes(const ModelConfig& c, int multiprocessors, int64_t context) {
  const int64_t width = qkv_width(c), heads = int64_t(c.heads) * c.head_dim_k, wide = std::max(c.dim, heads);
  const int64_t tables = (c.rope_window ? 2 : 1) * (1024 + context / 1024 + 1) * c.head_dim_k * int64_t(sizeof(double));
  const int64_t weights = (width * c.dim + heads * c.dim + 3 * c.ff_dim * c.dim) * int64_t(sizeof(card::half_t));
  const int64_t token =
      (2 * c.dim + width + 2 * c.ff_dim + c.vocab + 2 * heads + 4 * c.head_dim_k) * 4 + card::CardRow::bytes(wide) +
      card::CardRow::bytes(c.ff_dim) +
      card::DecodeScratch::bytes(c.heads, card_splits(multiprocessors, c.kv_heads) + kCardRawSplits, c.head_dim_k);
  return tables + weights + token + kCardGemmWorkspace + 64 * 256;
}

int64_t card_feed_bytes(int64_t largest_layer) { return 2 * largest_layer + kRounding; }

Result<CardPlan> plan_card(const LoadedModel& model, const CardPlanRequest& q) {
  const ModelConfig& c = model.config();
  const ModelWeights& w = model.weights();
  LONGKV_ASSIGN(const CardStack output, CardStack::of({&w.output}, "output matrix"));
  std::vector<int64_t> in_file, on_card;
  for (int l = 0; l < c.layers; ++l) {
    LONGKV_ASSIGN(const CardLayerStacks s, CardLayerStacks::of(w.layers[size_t(l)], l));
    in_file.push_back(s.file_bytes());
    on_card.push_back(s.bytes());
  }
  const StoreRegions regions = store_regions(q.recipe.store, q.recipe.mask);
  std::vector<int> kept;
  if (regions.on && q.rows != CardRows::kInMemory) {
    LONGKV_ASSIGN(kept, kept_channels(c.kv_shape(), q.recipe));
  }
  const int64_t largest = *std::max_element(on_card.begin(), on_card.end());
  const int64_t vectors = c.layers * (4 * c.dim + qkv_width(c) + 8 * 64) * int64_t(sizeof(float)) + c.dim * 4;
  const int64_t work = card::card_kv_bytes(KvType::kF16, c.kv_heads, c.head_dim_k, round_up(q.context, 16));
  const auto plan_of = [&](int layers) {
    CardPlan p;
    p.layers = c.layers;
    p.on_card = layers;
    p.budget = q.budget;
    p.weight_bytes = output.bytes() + vectors;
    for (int l = 0; l < c.layers; ++l) {
      if (l < p.in_memory()) {
        p.memory_bytes += in_file[size_t(l)];
      } else {
        p.weight_bytes += on_card[size_t(l)];
        p.row_bytes += layer_rows(c, q, l, kept);
      }
    }
    const bool divided = layers < c.layers;
    const int64_t most = round_up(q.context, 64);
    const int64_t chunk = q.chunk > 0 ? q.chunk : std::min(most, divided ? kPlannedChunk : kFullCardChunk);
    p.span = divided ? std::max(chunk, std::min(round_up(q.context, chunk), kPlannedSpan / chunk * chunk)) : chunk;
    // As CardRunner divides what is left: a half of it for chunks, or a quarter.
    p.scratch_bytes = card_graph_bytes(c, q.multiprocessors, q.context) +
                      (divided ? 2 : 4) * std::max(card_chunk_bytes(c, chunk), p.span * c.dim * 4);
    if (divided) p.scratch_bytes += card_feed_bytes(largest);
    if (divided || q.rows != CardRows::kOnCard || regions.on || !card::attended_in_place(q.recipe.store.k))
      p.scratch_bytes += work;
    return p;
  };
  if (q.layers >= 0) return plan_of(std::min(q.layers, c.layers));
  CardPlan plan = plan_of(c.layers);
  for (int layers = c.layers - 1; layers >= 0 && !plan.fits(); --layers) plan = plan_of(layers);
  return plan;
}

std::string card_plan_text(const CardPlan& p) {
  std::string text =
      fmt::format("card: {} of {} layers, {} of {}{} (weights {}, KV {}, buffers {})\n", p.on_card, p.layers,
                  format_bytes(p.total()), format_bytes(p.budget), p.fits() ? "" : ": DOES NOT FIT",
                  format_bytes(p.weight_bytes), format_bytes(p.row_bytes), format_bytes(p.scratch_bytes));
  if (p.in_memory() > 0) {
    text += fmt::format(
        "      the first {} layers stay in memory: the CPU reads {} of weights for every token, and the card takes "
        "them once for {} tokens of a prompt\n",
        p.in_memory(), format_bytes(p.memory_bytes), p.span);
  }
  return text;
}

nlohmann::ordered_json card_plan_json(const CardPlan& p) {
  return {{"layers", p.layers},
          {"layers_on_card", p.on_card},
          {"vram_bytes", p.total()},
          {"vram_budget_bytes", p.budget},
          {"fits", p.fits()},
          {"weight_bytes", p.weight_bytes},
          {"kv_bytes", p.row_bytes},
          {"buffer_bytes", p.scratch_bytes},
          {"memory_weight_bytes", p.memory_bytes},
          {"prompt_span_tokens", p.span}};
}

}  // namespace longkv
