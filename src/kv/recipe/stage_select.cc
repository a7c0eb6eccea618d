#include "base/error.h"
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

constexpr const char* kTopk = " topk ";

const RecipeField kFields[] = {
    LONGKV_COUNT_FIELD("budget", kTopk, 1, kMaxRecipeRows, true, select.budget),
    LONGKV_COUNT_FIELD("sink", kTopk, 0, kMaxRecipeRows, true, select.sink),
    LONGKV_COUNT_FIELD("local", kTopk, 0, kMaxRecipeRows, true, select.local),
    LONGKV_WORD_FIELD("heads", kTopk, "kv shared query", false, select.heads),
    LONGKV_WORD_FIELD("aggregate", kTopk, "sum max softmax", false, select.aggregate),
    LONGKV_COUNT_FIELD("dense_layers", kTopk, 0, 65536, false, select.dense_layers),
    LONGKV_COUNT_FIELD("layer_step", kTopk, 1, 65536, false, select.layer_step),
    LONGKV_COUNT_FIELD("token_step", kTopk, 1, 65536, false, select.token_step),
    LONGKV_COUNT_FIELD("preselect", kTopk, 0, kMaxRecipeRows, false, select.preselect),
    LONGKV_COUNT_FIELD("preselect_queries", kTopk, 1, 4096, false, select.preselect_queries),
    LONGKV_COUNT_FIELD("preselect_kernel", kTopk, 1, 1023, false, select.preselect_kernel),
};

const RecipePreset kPresets[] = {
    {"full", "select=all"},
    // Pages of 16, the last page inside the budget, the first two layers dense, no sinks forced.
    {"quest", "index=minmax(block=16) + select=topk(budget=1024,sink=0,local=0,dense_layers=2)"},
    // n_init 128, n_local 4096, 16 blocks of 128, 4 representatives.
    {"infllm", "index=dynamic(block=128,reps=4) + select=topk(budget=6272,sink=128,local=4096,heads=shared)"},
    // One initial block, 96 chosen ones and a local window of 4096 tokens, one list for all heads of a layer.
    {"ktransformers", "index=dynamic(block=128,reps=1) + select=topk(budget=16512,sink=128,local=4096,heads=shared)"},
    {"ktransformers-preselect",
     "index=dynamic(block=128,reps=1) + select=topk(budget=8320,sink=128,local=4096,heads=shared,dense_layers=2,"
     "preselect=32)"},
};

Status validate(const Recipe& recipe) {
  const IndexSpec& index = recipe.index;
  const SelectSpec& select = recipe.select;
  if (select.all) return {};
  if (index.kind == IndexKind::kNone) {
    return fail(Code::kInvalidArgument,
                "select=topk needs an index to choose by; nearest legal recipes: index=minmax(block=16) with it, or "
                "select=all");
  }
  if (select.preselect_kernel % 2 == 0) {
    return fail(Code::kInvalidArgument, "preselect_kernel={} has no middle; nearest legal: {}", select.preselect_kernel,
                select.preselect_kernel + 1);
  }
  // Everything attended counts: sinks, local window, the open block, rows that arrive before the next choice.
  const int64_t forced = select.sink + select.local + index.block - 1 + select.token_step - 1;
  if (forced + index.block > select.budget) {
    return fail(
        Code::kInvalidArgument,
        "budget={} holds no block of {} beside up to {} forced rows (sink={}, local={}, open block of up to {}, "
        "token_step={}); nearest legal: budget={}, or a smaller local window or block",
        select.budget, index.block, forced, select.sink, select.local, index.block - 1, select.token_step,
        forced + index.block);
  }
  return {};
}

}  // namespace

RecipeStageInfo select_stage() {
  return {RecipeStage::kSelect,
          "select",
          {"all", "topk"},
          true,
          kFields,
          kPresets,
          [](const Recipe& r) { return std::string(r.select.all ? "all" : "topk"); },
          [](Recipe& r, std::string_view choice) {
            r.select = SelectSpec{};
            r.select.all = choice == "all";
          },
          validate};
}

}  // namespace longkv
