#include "base/error.h"
#include "kv/recipe/stage.h"
#include "kv/select/budgets.h"

namespace longkv {

namespace {

constexpr const char* kTopK = " topk ";
constexpr const char* kTopP = " topp ";
constexpr const char* kRanked = " topk topp ";
constexpr const char* kAny = " topk topp sampled ";
constexpr const char* kModes[] = {"topk", "topp", "sampled"};

const RecipeField kFields[] = {
    LONGKV_COUNT_FIELD("budget", kRanked, 1, kMaxRecipeRows, true, select.budget),
    LONGKV_REAL_FIELD("share", kTopK, 0, 1, false, select.share),
    LONGKV_TEXT_FIELD("budgets", kTopK, false, select.budgets),
    LONGKV_COUNT_FIELD("sink", kAny, 0, kMaxRecipeRows, true, select.sink),
    LONGKV_COUNT_FIELD("local", kAny, 0, kMaxRecipeRows, true, select.local),
    LONGKV_REAL_FIELD("p", kTopP, 0, 1, true, select.p),
    LONGKV_COUNT_FIELD("candidates", kTopP, 1, kMaxRecipeRows, true, select.candidates),
    LONGKV_WORD_FIELD("refine", kRanked, "none exact int4", false, select.refine),
    LONGKV_COUNT_FIELD("over", kTopK, 1, 64, false, select.over),
    LONGKV_WORD_FIELD("heads", kRanked, "kv shared query", false, select.heads),
    LONGKV_WORD_FIELD("aggregate", kRanked, "sum max softmax", false, select.aggregate),
    LONGKV_COUNT_FIELD("dense_layers", kAny, 0, 65536, false, select.dense_layers),
    LONGKV_TEXT_FIELD("dense", kAny, false, select.dense),
    LONGKV_COUNT_FIELD("layer_step", kRanked, 1, 65536, false, select.layer_step),
    LONGKV_COUNT_FIELD("token_step", kRanked, 1, 65536, false, select.token_step),
    LONGKV_REAL_FIELD("drift", kRanked, -1, 1, false, select.drift),
    LONGKV_COUNT_FIELD("preselect", kTopK, 0, kMaxRecipeRows, false, select.preselect),
    LONGKV_COUNT_FIELD("preselect_queries", kTopK, 1, 4096, false, select.preselect_queries),
    LONGKV_COUNT_FIELD("preselect_kernel", kTopK, 1, 1023, false, select.preselect_kernel),
};

const RecipePreset kPresets[] = {
    {"full", "select=all"},
    // Pages of 16, the last page inside the budget, the first two layers dense, no sinks forced. Boxes in bytes answer
    // as boxes in halves do (docs/results.md) and are read in half of the time.
    {"quest", "index=minmax(block=16,summary=q8) + select=topk(budget=1024,sink=0,local=0,dense_layers=2)"},
    // n_init 128, n_local 4096, 16 blocks of 128, one vector a query head from 4 representatives, one list for a layer.
    {"infllm", "index=repr(block=128,reps=4) + select=topk(budget=6272,sink=128,local=4096,heads=shared)"},
    // One initial block, 96 chosen ones and a local window of 4096 tokens, one list for all heads of a layer.
    {"ktransformers", "index=dynamic(block=128,reps=1) + select=topk(budget=16512,sink=128,local=4096,heads=shared)"},
    {"ktransformers-preselect",
     "index=dynamic(block=128,reps=1) + select=topk(budget=8320,sink=128,local=4096,heads=shared,dense_layers=2,"
     "preselect=32)"},
    // The rows of most softmax mass, by the keys themselves: what no selector of so many rows can exceed.
    {"oracle", "index=fixed(block=1,reps=1,coarse=1) + select=topk(budget=1024,sink=0,local=1,aggregate=softmax)"},
    // Ours: signs of rotated keys, pages of 16.
    {"onebit", "index=bits(block=16,coarse=1) + select=topk(budget=1024,sink=16,local=64,aggregate=softmax)"},
    // r = 32 channels, k rows with a local window of k / 4, the mean value for the rest.
    {"sparq", "index=channels(channels=32,coarse=1) + select=topk(budget=1024,sink=0,local=256) + tail=mean"},
    // A label cache of 16 channels in 4 bits, heavy tokens by the sum of the group's scores.
    {"double_sparsity", "index=labels(channels=16,coarse=1) + select=topk(budget=1024,sink=0,local=64)"},
    // Quest hands 8192 rows on; 4-bit keys find the smallest set with 85% of their mass. Two dense layers.
    {"twilight",
     "index=minmax(block=16) + select=topp(budget=8192,sink=0,local=16,p=0.85,candidates=8192,refine=int4,"
     "dense_layers=2)"},
    // K = 10, L = 150, layers 0, 16, 32, ... dense, 4 sinks and 64 local rows.
    {"magicpig", "index=lsh(hash_bits=10,tables=150) + select=sampled(sink=4,local=64,dense=\"0,16,32,48,64\")"},
    // Clusters of 16 tokens: 1.8% of the context read exactly, the next 23.2% of the clusters estimated.
    {"retroinfer",
     "index=clusters(cluster=16,segment=8192) + select=topk(budget=1024,share=0.018,sink=4,local=64,"
     "aggregate=softmax) + tail=clusters(share=0.232)"},
    // Sinks, window, the best rows, and a sample of the others for 5% of error at 95% confidence.
    {"vattention",
     "index=bits(block=1,coarse=1) + select=topk(budget=1024,sink=128,local=128,aggregate=softmax) + "
     "tail=sample(rate=0.025,epsilon=0.05,delta=0.05)"},
};

bool knows_blocks(IndexKind kind) { return kind != IndexKind::kLsh && kind != IndexKind::kClusters; }

// Rules of how rows are chosen from what the index says.
Status validate_mode(const Recipe& recipe) {
  const IndexSpec& index = recipe.index;
  const SelectSpec& select = recipe.select;
  if (select.mode == SelectMode::kSampled && index.kind != IndexKind::kLsh) {
    return fail(Code::kInvalidArgument,
                "select=sampled draws rows from hash tables, and index={} has none; nearest legal: "
                "index=lsh(hash_bits=10,tables=150) with it, or select=topk with a tail=sample",
                index_kind_name(index.kind));
  }
  if (select.mode == SelectMode::kTopP && (select.refine == Refine::kNone || !knows_blocks(index.kind))) {
    return fail(Code::kInvalidArgument,
                "select=topp needs scores of single rows that add up to a softmax; nearest legal: "
                "index=minmax(block=16) + select=topp(refine=int4), or refine=exact");
  }
  if (select.refine != Refine::kNone && !knows_blocks(index.kind)) {
    return fail(Code::kInvalidArgument, "refine={} does not go with index={}; nearest legal: refine=none",
                select.refine == Refine::kExact ? "exact" : "int4", index_kind_name(index.kind));
  }
  if (index.kind == IndexKind::kRepr && select.heads == SelectHeads::kPerQueryHead) {
    return fail(Code::kInvalidArgument,
                "index=repr scores all heads of a group together; nearest legal: heads=kv or heads=shared");
  }
  if (index.kind == IndexKind::kClusters && select.heads != SelectHeads::kPerKvHead) {
    return fail(Code::kInvalidArgument, "index=clusters has other clusters in every KV head; nearest legal: heads=kv");
  }
  if (index.kind == IndexKind::kClusters && (select.layer_step > 1 || select.token_step > 1 || select.preselect > 0)) {
    return fail(Code::kInvalidArgument,
                "clusters are chosen anew in every layer and step; nearest legal: layer_step=1, token_step=1 and "
                "preselect=0 with index=clusters");
  }
  return {};
}

Status validate(const Recipe& recipe) {
  const IndexSpec& index = recipe.index;
  const SelectSpec& select = recipe.select;
  if (select.all) return {};
  if (index.kind == IndexKind::kNone) {
    return fail(Code::kInvalidArgument,
                "select={} needs an index to choose by; nearest legal recipes: index=minmax(block=16) with "
                "select=topk, or select=all",
                kModes[size_t(select.mode)]);
  }
  if (select.preselect_kernel % 2 == 0) {
    return fail(Code::kInvalidArgument, "preselect_kernel={} has no middle; nearest legal: {}", select.preselect_kernel,
                select.preselect_kernel + 1);
  }
  LONGKV_TRY(validate_mode(recipe));
  LONGKV_ASSIGN(const BudgetLists lists, parse_budgets(select.budgets));
  LONGKV_ASSIGN(const std::vector<int64_t> dense, parse_layers(select.dense));
  if (select.mode == SelectMode::kSampled) return {};
  // Everything attended counts: sinks, local window, the open block, rows that arrive before the next choice.
  const int64_t forced = select.sink + select.local + index.block - 1 + select.token_step - 1;
  int64_t least = select.budget;
  for (const auto& layer : lists) {
    for (const int64_t budget : layer) least = std::min(least, budget);
  }
  if (forced + index.block > least) {
    return fail(
        Code::kInvalidArgument,
        "budget={} holds no block of {} beside up to {} forced rows (sink={}, local={}, open block of up to {}, "
        "token_step={}); nearest legal: budget={}, or a smaller local window or block",
        least, index.block, forced, select.sink, select.local, index.block - 1, select.token_step,
        forced + index.block);
  }
  return {};
}

}  // namespace

RecipeStageInfo select_stage() {
  return {RecipeStage::kSelect,
          "select",
          {"all", "topk", "topp", "sampled"},
          true,
          kFields,
          kPresets,
          [](const Recipe& r) { return std::string(r.select.all ? "all" : kModes[size_t(r.select.mode)]); },
          [](Recipe& r, std::string_view choice) {
            r.select = SelectSpec{};
            r.select.all = choice == "all";
            for (size_t m = 0; m < std::size(kModes); ++m) {
              if (choice == kModes[m]) r.select.mode = SelectMode(m);
            }
            if (r.select.mode == SelectMode::kTopP) {
              r.select.budget = r.select.candidates;
              r.select.refine = Refine::kInt4;
            }
          },
          validate};
}

}  // namespace longkv
