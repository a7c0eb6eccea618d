#include "kv/plan.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "kv/keep/keep.h"
#include "kv/plan_store.h"
#include "kv/select/budgets.h"
#include "kv/select/coarse.h"
#include "kv/select/layer_plan.h"
#include "kv/tail/value_means.h"
#include "prefill/sparse.h"

namespace longkv {

namespace {

constexpr int64_t kMaxContext = int64_t{1} << 36;
constexpr int64_t kMaxShape = 1 << 16;  // layers, heads and channels: keeps every product below 2^63
constexpr int64_t kPage = 4096;
constexpr int64_t kUsualChunk = 512;  // prompt tokens that pass a layer together

Status check_inputs(const PlanModel& model, const Recipe& recipe, int64_t context) {
  const KvShape& s = model.shape;
  for (const int64_t n : {s.layers, s.kv_heads, s.group_size, s.dim_k, s.dim_v}) {
    if (n < 1 || n > kMaxShape) {
      return fail(Code::kInvalidArgument,
                  "a KV cache of {} layers, {} KV heads, {} query heads each, {} and {} channels cannot be planned",
                  s.layers, s.kv_heads, s.group_size, s.dim_k, s.dim_v);
    }
  }
  if (int64_t(s.layers) * s.kv_heads * s.group_size * (s.dim_k + s.dim_v) > (int64_t{1} << 24)) {
    return fail(Code::kInvalidArgument, "a KV cache of {} layers with {} query heads is too large to plan", s.layers,
                int64_t(s.kv_heads) * s.group_size);
  }
  if (context < 0 || context > kMaxContext) {
    return fail(Code::kInvalidArgument, "a context of {} tokens is out of range; at most {}", context, kMaxContext);
  }
  const std::pair<KvType, int> parts[] = {{recipe.store.k, s.dim_k}, {recipe.store.v, s.dim_v}};
  for (const auto& [type, dim] : parts) {
    if ((kv_type_quantized(type) || kv_type_blocked(type)) && dim % kKvQuantGroup != 0) {
      return fail(Code::kInvalidArgument,
                  "store={} needs channels in multiples of {}, this model has {}; nearest legal: "
                  "store=f16",
                  kv_type_name(type), kKvQuantGroup, dim);
    }
  }
  return {};
}

// Rows of a layer that are held after n tokens.
int64_t rows_held(int64_t window, int64_t n) { return window > 0 ? std::min(window, n) : n; }

struct IndexCost {
  int64_t held = 0;  // of one layer
  int64_t read = 0;  // of one choosing layer and step
};

// Follows kv/select: flat scan within the bytes of the attention it serves, else a coarse scan and a refinement. `read`
// is of a step that chooses.
IndexCost index_cost(const KvShape& shape, const Recipe& recipe, int64_t n, int64_t budget, int64_t capacity) {
  const IndexSpec& spec = recipe.index;
  const SelectSpec& select = recipe.select;
  const int64_t row_bytes = kv_row_bytes(recipe.store.k, shape.dim_k) + kv_row_bytes(recipe.store.v, shape.dim_v);
  const int64_t limit = index_limit(spec, shape, select.budget * row_bytes);
  const int64_t factor = choose_coarse_factor(spec, shape, capacity, limit);
  const int64_t fine_block = summary_bytes(spec, shape);
  const int64_t blocks = ceil_div(n, spec.kind == IndexKind::kClusters ? spec.cluster : spec.block);
  int64_t wanted = std::max<int64_t>(1, (budget - select.sink - select.local) / spec.block);
  if (select.mode == SelectMode::kTopP) {
    wanted = ceil_div(select.candidates, spec.block);
  } else if (select.refine != Refine::kNone) {
    wanted *= select.over;
  }
  IndexCost cost;
  cost.held = summary_bytes_held(spec, shape, n);
  cost.read = blocks * fine_block;
  if (factor > 1) {
    const int64_t n_coarse = ceil_div(blocks, factor);
    const int64_t coarse_read = n_coarse * summary_bytes(coarse_spec(spec, factor), shape);
    cost.held += coarse_read;
    const int64_t affordable = (limit - coarse_read) / std::max<int64_t>(1, fine_block);
    const int64_t keep = ceil_div(std::max(kRefineBudgets * wanted, affordable), factor);
    if (select.preselect == 0 && cost.read > limit && keep < n_coarse) {
      cost.read = coarse_read + keep * factor * fine_block;
    }
  }
  if (select.preselect > 0) cost.read = std::min(cost.read, select.preselect * fine_block);
  if (select.mode == SelectMode::kSampled) cost.read *= shape.group_size;  // every query head draws
  const int64_t refined = std::min(n, wanted * spec.block);
  if (select.refine == Refine::kInt4) {
    const int64_t token = summary_bytes(four_bit_spec(), shape);
    cost.held += n * token;
    cost.read += refined * token;
  } else if (select.refine == Refine::kExact) {
    cost.read += refined * kv_row_bytes(recipe.store.k, shape.dim_k);
  }
  if (recipe.tail.kind == TailKind::kMean) cost.held += n / ValueMeans::kStride * shape.dim_v * int64_t(sizeof(double));
  if (recipe.tail.kind == TailKind::kClusters) {
    cost.read += int64_t(recipe.tail.share * double(blocks)) * 4 * (shape.dim_k + shape.dim_v);
  }
  cost.held *= shape.kv_heads;
  cost.read *= shape.kv_heads;
  return cost;
}

// Rows that a list of a layer reads beside those that the budget pays for: a sample of the others.
int64_t sampled_rows(const Recipe& recipe, int64_t rows, int64_t attended) {
  if (recipe.tail.kind != TailKind::kSample) return 0;
  return int64_t(recipe.tail.rate * double(rows - attended));
}

// Of n rows, those that two or more of the hash tables draw for one query head, were keys spread evenly: at right
// angles to the query.
int64_t drawn_rows(const IndexSpec& spec, int64_t n) {
  const double shared = std::pow(0.5, spec.hash_bits), tables = double(spec.tables);
  return int64_t(double(n) * (1.0 - std::pow(1.0 - shared, tables - 1.0) * (tables * shared + 1.0 - shared)));
}

// Fills what depends on the context.
void measure(KvPlan& plan) {
  const KvShape& shape = plan.model.shape;
  const Recipe& recipe = plan.recipe;
  const SelectSpec& select = recipe.select;
  const int64_t n = plan.context;
  plan.k_bytes = plan.v_bytes = plan.field_bytes = plan.index_bytes = plan.prompt_bytes = 0;
  plan.read_rows_bytes = plan.read_index_bytes = 0;
  plan.dense_layers = plan.choosing_layers = plan.reusing_layers = plan.evicting_layers = 0;

  const std::vector<LayerPlan> layers = plan_layers(shape, recipe);
  const KeepNeeds needs = plan.keeper ? plan.keeper->needs() : KeepNeeds{};
  const Budgets budgets(select);
  int64_t unreleased = 0;  // rows that are held beside those that stay, at most
  for (size_t l = 0; l < layers.size(); ++l) {
    const LayerPlan& layer = layers[l];
    const bool evicts = plan.keeper && layer.window == 0;
    const int64_t rows = evicts ? plan.keeper->planned_rows(int(l), int(layers.size()), n) : rows_held(layer.window, n);
    plan.evicting_layers += evicts ? 1 : 0;
    plan.field_bytes += shape.kv_heads * rows * needs.fields.bytes();
    const bool windowed = layer.window > 0;
    const StoreBytes held = stored_bytes(shape, recipe, plan.kept_channels, int(l), windowed, rows, kPage);
    plan.k_bytes += held.k;
    plan.v_bytes += held.v;
    // Dense layers with a sliding window return rows chunk by chunk.
    const bool returns = layer.window > 0 && layer.role == LayerRole::kDense;
    const int64_t waiting =
        returns ? std::min(n - rows, SparsePrefill::chunk_tokens(recipe.prefill, kUsualChunk, n)) : n - rows;
    const int64_t leaving = evicts && needs.every_chunk ? 0 : waiting;
    // Where the prompt is read again, every layer waits for the end.
    unreleased = evicts && needs.repeat_chunk > 0 ? unreleased + leaving : std::max(unreleased, leaving);

    int64_t attended = rows;
    int64_t readers = 1;  // lists that read rows of one KV head
    switch (layer.role) {
      case LayerRole::kDense: ++plan.dense_layers; break;
      case LayerRole::kChoose:
      case LayerRole::kReuse: {
        const bool chooses = layer.role == LayerRole::kChoose;
        const int64_t budget = select.mode == SelectMode::kSampled ? select.sink + select.local
                                                                   : budgets.most(layer.source, shape.kv_heads, rows);
        ++(chooses ? plan.choosing_layers : plan.reusing_layers);
        if (chooses) {
          const IndexCost cost = index_cost(shape, recipe, evicts ? rows : n, budget, n);
          plan.index_bytes += cost.held;
          if (rows > budget) plan.read_index_bytes += cost.read / select.token_step;
        }
        if (rows > budget) {
          attended = budget + sampled_rows(recipe, rows, budget);
          if (select.heads == SelectHeads::kPerQueryHead) readers = shape.group_size;
          if (select.mode == SelectMode::kSampled) {
            attended = budget + drawn_rows(recipe.index, rows - budget) * shape.group_size;
          }
        }
        break;
      }
    }
    plan.read_rows_bytes +=
        readers * attended_bytes(shape, recipe, plan.kept_channels, int(l), windowed, rows, attended);
  }

  const int64_t hidden = n * plan.model.hidden_bytes_per_token;
  const int64_t limit = plan.model.hidden_bytes_limit;
  const KvTypes raw = store_regions(recipe.store, recipe.mask).raw;
  const int64_t raw_row = kv_row_bytes(raw.k, shape.dim_k) + kv_row_bytes(raw.v, shape.dim_v);
  plan.prompt_bytes = (limit > 0 ? std::min(hidden, limit) : hidden) +
                      std::max(unreleased * shape.kv_heads * raw_row, raw_prompt_bytes(shape, recipe, n));
  const bool mass = plan.choosing_layers > 0 && (recipe.index.kind == IndexKind::kDynamic ||
                                                 recipe.index.kind == IndexKind::kRepr || select.preselect > 0);
  if (mass || needs.mass_queries > 0) {
    const int64_t held = needs.every_chunk ? std::min(n, keep_budget(recipe.keep, n) + kUsualChunk) : n;
    plan.prompt_bytes += held * shape.kv_heads * shape.group_size * int64_t(sizeof(float));
  }
  if (needs.scoring != KeepScoring::kNone && n > needs.scored_above) {
    plan.prompt_bytes += std::min(n, kUsualChunk) * plan.model.tape_bytes_per_token;
    // Masses of all layers; gradients by all rows held and by the chunk's, and what is remembered of them.
    const int64_t rows = std::min(n, keep_budget(recipe.keep, n) + kUsualChunk) * plan.evicting_layers;
    plan.prompt_bytes += rows * shape.kv_heads * shape.group_size * int64_t(sizeof(float));
    if (needs.scoring != KeepScoring::kMass) plan.prompt_bytes += 2 * rows * shape.kv_heads * shape.dim_k * 4;
  }
  // A reading again leaves one number a row in every layer.
  if (needs.repeat_chunk > 0) plan.prompt_bytes += plan.evicting_layers * n * shape.kv_heads * int64_t(sizeof(float));
  if (needs.statistics_from >= 0) {
    plan.prompt_bytes +=
        int64_t(shape.kv_heads) * shape.group_size * shape.dim_k * shape.dim_k * int64_t(sizeof(double));
  }

  plan.peak_bytes = plan.model.weight_bytes + plan.model.scratch_bytes + plan.k_bytes + plan.v_bytes +
                    plan.field_bytes + plan.index_bytes + plan.prompt_bytes - plan.disk_needed();
  plan.read_bytes = plan.model.weight_bytes_per_token + plan.read_rows_bytes + plan.read_index_bytes;
  plan.token_seconds = plan.machine.bandwidth > 0 ? double(plan.read_bytes) / double(plan.machine.bandwidth) : 0;
}

bool fits_at(KvPlan plan, int64_t context) {
  plan.context = context;
  measure(plan);
  return plan.fits();
}

// Largest context up to `limit` whose peak fits; 0 if none does. Peaks never fall with the context, save where a larger
// capacity switches the index to two levels, by less than the step below matters.
int64_t largest_that_fits(const KvPlan& plan, int64_t limit) {
  int64_t fits = 0;
  int64_t over = limit + 1;
  while (over - fits > 1) {
    const int64_t middle = fits + (over - fits) / 2;
    (fits_at(plan, middle) ? fits : over) = middle;
  }
  return fits;
}

}  // namespace

Result<KvPlan> make_plan(const PlanModel& model, const Recipe& recipe, const PlanMachine& machine, int64_t context) {
  LONGKV_TRY(validate_recipe(recipe));
  LONGKV_TRY(check_inputs(model, recipe, context));
  KvPlan plan;
  plan.recipe = recipe;
  plan.model = model;
  LONGKV_ASSIGN(plan.kept_channels, kept_channels(model.shape, recipe));
  plan.machine = machine;
  LONGKV_ASSIGN(std::unique_ptr<Keeper> keeper, make_keeper(recipe.keep, model.shape));
  plan.keeper = std::move(keeper);
  const int64_t limit = model.trained_context > 0 ? std::min(model.trained_context, kMaxContext) : kMaxContext;
  plan.largest_context = largest_that_fits(plan, limit);
  plan.context = context > 0 ? context : std::max<int64_t>(1, plan.largest_context);
  measure(plan);
  return plan;
}

Status check_plan(const KvPlan& plan) {
  if (plan.fits()) return {};
  std::string advice;
  if (plan.largest_context > 0) {
    advice = fmt::format("the largest context that fits is -c {}", plan.largest_context);
  } else {
    advice = "no context fits: use a smaller model file or free memory";
  }
  for (const KvType type : {KvType::kQ8_0, KvType::kQ4_0}) {
    KvPlan smaller = plan;
    smaller.recipe.store = {type, type};
    if (!check_inputs(smaller.model, smaller.recipe, smaller.context).ok()) continue;
    measure(smaller);
    if (smaller.fits()) {
      advice += fmt::format("; -c {} fits with store={} ({})", plan.context, kv_type_name(type),
                            format_bytes(smaller.peak_bytes));
      break;
    }
  }
  if (plan.disk_needed() > plan.machine.disk_bytes) {
    return fail(Code::kOutOfMemory,
                "the KV cache of {} tokens needs {} on the disk, {} are free there (--kv-dir names another); {}",
                plan.context, format_bytes(plan.disk_needed()), format_bytes(plan.machine.disk_bytes), advice);
  }
  return fail(Code::kOutOfMemory,
              "a context of {} tokens needs {}, {} more than the {} available (weights {}, K {}, V {}, "
              "index {}, while the prompt is read {}, scratch {}); {}",
              plan.context, format_bytes(plan.peak_bytes), format_bytes(plan.peak_bytes - plan.machine.ram_bytes),
              format_bytes(plan.machine.ram_bytes), format_bytes(plan.model.weight_bytes), format_bytes(plan.k_bytes),
              format_bytes(plan.v_bytes), format_bytes(plan.index_bytes), format_bytes(plan.prompt_bytes),
              format_bytes(plan.model.scratch_bytes), advice);
}

}  // namespace longkv
