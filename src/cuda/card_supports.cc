// Which recipes the card decodes itself; the others keep their cache in memory.
#include "base/error.h"
#include "cuda/card_session.h"

#ifdef LONGKV_WITH_CUDA

#include <algorithm>

#include "base/checked.h"
#include "cuda/card_index.h"
#include "cuda/card_old.h"
#include "cuda/card_sparse.h"
#include "kv/keep/keep.h"
#include "kv/store_spec.h"

namespace longkv {

namespace {

// Rows that a recipe encodes when they grow old.
Status supports_old(const LoadedModel& model, const Recipe& recipe, const StoreRegions& regions) {
  const ModelConfig& c = model.config();
  if (regions.old.k != regions.old.v || !card::card_old_supports(regions.old.k, c.head_dim_k)) {
    return fail(Code::kUnsupported,
                "old rows of types {} and {} with {} channels; on the card both are kivi2 or kivi4, or f16 under a "
                "channel mask, with 64, 128 or 256 channels; nearest legal: the same recipe with store=kivi4",
                kv_type_name(regions.old.k), kv_type_name(regions.old.v), c.head_dim_k);
  }
  if (recipe.store.rotate != StoreRotate::kNone || recipe.mask.kind == MaskKind::kThink) {
    return fail(Code::kUnsupported,
                "the recipe {}; the card encodes old rows without rotation and under masks that are known before the "
                "prompt (leank); nearest legal: --kv-place cpu, or kivi4",
                recipe.canonical());
  }
  if (regions.sink % 16 != 0) {
    return fail(Code::kUnsupported,
                "{} first rows that are not encoded; the card wants a multiple of 16; nearest legal: sink={}",
                regions.sink, round_up(regions.sink, 16));
  }
  if (recipe.select.all) return {};
  const int64_t block = recipe.index.block * std::max<int64_t>(1, recipe.index.coarse);
  if (recipe.select.mode != SelectMode::kTopK || regions.window < block) {
    return fail(Code::kUnsupported,
                "the recipe {}; over encoded rows the card has select=topk, and blocks no longer than the last rows "
                "that are not encoded ({}); nearest legal: select=topk with window={}",
                recipe.canonical(), regions.window, std::max(regions.window, block));
  }
  return {};
}

// Rows that a keep stage drops or merges once a prompt was read.
Status supports_kept(const LoadedModel& model, const Recipe& recipe) {
  LONGKV_ASSIGN(const auto keeper, make_keeper(recipe.keep, model.config().kv_shape()));
  if (keeper->needs().step != KeepStep::kNone) {
    return fail(Code::kUnsupported,
                "the recipe {} evicts while decoding; the card decodes over the rows that prompts leave; nearest "
                "legal: keep=snapkv",
                recipe.canonical());
  }
  if (recipe.select.mode == SelectMode::kTopP && !recipe.select.all) {
    return fail(Code::kUnsupported,
                "the recipe {}; over rows that were dropped or merged the card has full attention and select=topk",
                recipe.canonical());
  }
  return {};
}

}  // namespace

Status card_supports(const LoadedModel& model, const Recipe& recipe) {
  const ModelConfig& c = model.config();
  const StoreRegions regions = store_regions(recipe.store, recipe.mask);
  const bool keeps = recipe.keep.evicts() && !regions.on;
  if (keeps) LONGKV_TRY(supports_kept(model, recipe));
  if (regions.on) {
    LONGKV_TRY(supports_old(model, recipe, regions));
  } else if (recipe.store.k != recipe.store.v || !card::card_kv_supports(recipe.store.k, c.head_dim_k)) {
    return fail(Code::kUnsupported,
                "rows of types {} and {} with {} channels; on the card K and V are both f16, bf16, q8_0, q4_0, fp8, "
                "kivi2 or kivi4, with 64, 96, 128 or 256 channels",
                kv_type_name(recipe.store.k), kv_type_name(recipe.store.v), c.head_dim_k);
  }
  // What the card does, with the values of this recipe; anything else in it makes a difference.
  Recipe can;
  can.store.k = recipe.store.k;
  can.store.v = recipe.store.v;
  if (regions.on) can.store = recipe.store, can.mask = recipe.mask;
  if (keeps) can.keep = recipe.keep;
  if (CardIndex::supports(recipe.index, recipe.select, c)) {
    can.index.kind = recipe.index.kind;
    can.index.block = recipe.index.block;
    can.index.eight = recipe.index.eight;
    can.index.rotate = recipe.index.rotate;
    can.index.unbiased = recipe.index.unbiased;
    can.index.coarse = recipe.index.coarse;  // of bits the card scores every block
    can.select.all = recipe.select.all;
    can.select.budget = recipe.select.budget;
    can.select.sink = recipe.select.sink;
    can.select.local = recipe.select.local;
    can.select.heads = recipe.select.heads;
    can.select.aggregate = recipe.select.aggregate;
    can.select.dense_layers = recipe.select.dense_layers;
    if (recipe.select.mode == SelectMode::kTopP) {
      can.select.mode = recipe.select.mode;
      can.select.refine = recipe.select.refine;
      can.select.candidates = recipe.select.candidates;
      can.select.p = recipe.select.p;
    }
  }
  if (CardSparse::supports(recipe.prefill.kind) && recipe.store.k != KvType::kBf16 && !keeps)
    can.prefill = recipe.prefill;
  if (recipe == can) return {};
  return fail(
      Code::kUnsupported,
      "the recipe {}; with its KV on the card, longkv has full attention and select=topk over blocks of a multiple of "
      "16: index=minmax or mean (aggregate sum or max), as in quest, and index=bits (one bit, aggregate softmax), as "
      "in onebit, also select=topp over their tokens with refine=exact (twilight:refine=exact); keep stages that evict "
      "or merge after prompts, over rows that are not encoded later; prompts are read densely or, with rows of types "
      "other than bf16, by any pattern but flex",
      recipe.canonical());
}

Status card_supports_hybrid(const LoadedModel& model, const Recipe& recipe) {
  LONGKV_TRY(card_supports(model, recipe));
  if (recipe.keep.evicts()) {
    return fail(Code::kUnsupported,
                "the recipe {} drops or merges rows; --kv-place hybrid holds all of them in memory: use --kv-place gpu",
                recipe.canonical());
  }
  if (store_regions(recipe.store, recipe.mask).on) {
    return fail(Code::kUnsupported,
                "the recipe {} encodes old rows; --kv-place hybrid holds rows as they came: use --kv-place gpu, or "
                "store=q8_0",
                recipe.canonical());
  }
  if (recipe.select.all) {
    return fail(Code::kUnsupported,
                "the recipe {} attends every row; --kv-place hybrid holds rows in memory for recipes that choose "
                "blocks, as quest:budget=4096 does",
                recipe.canonical());
  }
  if (recipe.select.mode == SelectMode::kTopP)
    return fail(
        Code::kUnsupported,
        "the recipe {} weighs the keys of its candidates; --kv-place hybrid has them in memory: use --kv-place gpu",
        recipe.canonical());
  if (recipe.store.k == KvType::kBf16)
    return fail(Code::kUnsupported, "rows of type bf16; with --kv-place hybrid they are f16, q8_0, q4_0 or fp8");
  return {};
}

}  // namespace longkv

#else

namespace longkv {

Status card_supports(const LoadedModel&, const Recipe&) { return cuda_cards().status(); }
Status card_supports_hybrid(const LoadedModel&, const Recipe&) { return cuda_cards().status(); }

}  // namespace longkv

#endif
