#include "planning.h"

#include "base/log.h"
#include "grad/chunk_scorer.h"
#include "kv/index/index.h"
#include "kv/recipe/fit.h"
#include "model_label.h"
#include "output.h"
#include "prefill/sparse.h"

namespace longkv::cli {

namespace {

// Measured, resident: the program with its libraries, and the tokenizer's tables for each token of the vocabulary.
constexpr int64_t kProgramBytes = int64_t(9) << 20;
constexpr int64_t kTokenizerBytes = 256;

}  // namespace

Result<KvPlan> plan_for(const LoadedModel& model, const Recipe& recipe, int64_t context, int64_t chunk, int threads,
                        const PlanLimits& limits) {
  const ModelConfig& c = model.config();
  PlanModel m;
  m.shape = c.kv_shape();
  m.trained_context = c.context;
  m.weight_bytes = int64_t(model_bytes(model));
  m.weight_bytes_per_token = int64_t(model.weights().bytes_per_token());
  m.hidden_bytes_per_token = Session::hidden_bytes(c, 1);
  m.hidden_bytes_limit = Session::hidden_bytes(c, c.context);
  m.tape_bytes_per_token = ChunkScorer::bytes_per_token(c);
  m.scratch_bytes =
      kProgramBytes + c.vocab * (kTokenizerBytes + int64_t(sizeof(float))) +
      Graph::scratch_bytes(c, SparsePrefill::chunk_tokens(recipe.prefill, chunk, context > 0 ? context : c.context));
  PlanMachine machine;
  // Packed weights are in memory already, and counted as weights.
  machine.ram_bytes = limits.ram_bytes > 0 ? limits.ram_bytes : available_ram_bytes() + int64_t(model.packed_bytes());
  machine.bandwidth = limits.bandwidth;
  machine.threads = threads;
  machine.disk_bytes = limits.disk_bytes;
  return make_plan(m, recipe, machine, context);
}

Status check_recipe_files(const Opened& opened) {
  const KvShape shape = opened.model->config().kv_shape();
  LONGKV_TRY(SparsePrefill::create(opened.recipe.prefill, shape).status());
  if (opened.recipe.index.file.empty()) return {};
  IndexSpec index = opened.recipe.index;
  for (index.layer = opened.recipe.select.dense_layers; index.layer < shape.layers; ++index.layer) {
    if (shape.window_of(index.layer) == 0) LONGKV_TRY(make_index(index, shape, 1).status());
  }
  return {};
}

Status note_misfits(const Recipe& recipe, const LoadedModel& model) {
  for (const std::string& misfit : recipe_misfits(recipe, model.config().kv_shape())) {
    LONGKV_TRY(notice(fmt::format("{}: {}", recipe.name, misfit)));
  }
  return {};
}

Status explain_kv(const Opened& opened, bool json) {
  LONGKV_TRY(check_recipe_files(opened));
  PlanLimits limits;
  limits.bandwidth = int64_t(read_bandwidth(*opened.pool));
  limits.disk_bytes = opened.disk_bytes;
  LONGKV_ASSIGN(const KvPlan plan,
                plan_for(*opened.model, opened.recipe, opened.context, opened.chunk, opened.pool->threads(), limits));
  return print(json ? json_text(plan_json(plan)) : plan_text(plan));
}

}  // namespace longkv::cli
