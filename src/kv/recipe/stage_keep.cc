#include <cmath>

#include "base/error.h"
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

// The methods that recipes can name.
constexpr KeepKind kKinds[] = {
    KeepKind::kAll,    KeepKind::kStreaming, KeepKind::kKnorm,    KeepKind::kKeydiff,   KeepKind::kRandom,
    KeepKind::kSnapkv, KeepKind::kTova,      KeepKind::kH2o,      KeepKind::kPyramidkv, KeepKind::kExpectedAttention,
    KeepKind::kAdakv,  KeepKind::kDuo,       KeepKind::kNormmass, KeepKind::kKvslimmer, KeepKind::kAsymkv,
    KeepKind::kKvzip,  KeepKind::kFastgen};

constexpr const char* kBudgeted =
    " knorm keydiff random snapkv tova h2o pyramidkv expected_attention adakv normmass kvslimmer asymkv ";
constexpr const char* kWindowed =
    " knorm keydiff random snapkv pyramidkv expected_attention adakv normmass kvslimmer asymkv ";
constexpr const char* kVoted = " snapkv pyramidkv adakv ";
constexpr const char* kMerging = " normmass kvslimmer asymkv ";
constexpr const char* kSampling = " normmass kvslimmer ";
constexpr const char* kExpected = " expected_attention adakv ";

// A budget in rows and one as a share exclude each other: giving one takes the other back.
RecipeField budget_field() {
  RecipeField field = LONGKV_COUNT_FIELD("budget", kBudgeted, 0, kMaxRecipeRows, true, keep.budget);
  field.set = [](Recipe& r, const RecipeValue& v) {
    r.keep.budget = std::get<int64_t>(v);
    if (r.keep.budget > 0) r.keep.keep_ratio = 0;
  };
  return field;
}
RecipeField ratio_field() {
  RecipeField field = LONGKV_REAL_FIELD("keep_ratio", kBudgeted, 0, 1, false, keep.keep_ratio);
  field.set = [](Recipe& r, const RecipeValue& v) {
    r.keep.keep_ratio = std::get<double>(v);
    if (r.keep.keep_ratio > 0) r.keep.budget = 0;
  };
  return field;
}

// The scorer of adakv brings its published sinks, window and epsilon; given after it, they change it.
RecipeField scorer_field() {
  RecipeField field = LONGKV_WORD_FIELD("scorer", " adakv ", "snapkv expected", false, keep.scorer);
  field.set = [](Recipe& r, const RecipeValue& v) {
    r.keep.scorer = KeepScorer(std::get<int64_t>(v));
    const bool expected = r.keep.scorer == KeepScorer::kExpected;
    r.keep.sink = expected ? 4 : 0;
    r.keep.window = expected ? 0 : 32;
    r.keep.epsilon = expected ? 1e-2 : 0;
  };
  return field;
}

const RecipeField kFields[] = {
    scorer_field(),
    budget_field(),
    ratio_field(),
    LONGKV_COUNT_FIELD("sink", " streaming duo ", 0, kMaxRecipeRows, true, keep.sink),
    LONGKV_COUNT_FIELD("sink", kBudgeted, 0, kMaxRecipeRows, false, keep.sink),
    LONGKV_COUNT_FIELD("window", " streaming duo ", 1, kMaxRecipeRows, true, keep.window),
    LONGKV_COUNT_FIELD("window", " knorm keydiff random expected_attention adakv normmass kvslimmer asymkv ", 0,
                       kMaxRecipeRows, false, keep.window),
    LONGKV_COUNT_FIELD("window", " snapkv pyramidkv ", 1, 4096, false, keep.window),
    LONGKV_WORD_FIELD("positions", " streaming ", "absolute cache", false, keep.cache_positions),
    LONGKV_COUNT_FIELD("kernel", kVoted, 1, 1023, false, keep.kernel),
    LONGKV_WORD_FIELD("pool", kVoted, "max avg", false, keep.pool),
    LONGKV_WORD_FIELD("reduce", kVoted, "mean max sum", false, keep.reduce),
    LONGKV_COUNT_FIELD("seed", " random ", 0, kMaxRecipeRows, false, keep.seed),
    LONGKV_REAL_FIELD("recent", " h2o ", 0, 1, false, keep.recent),
    LONGKV_WORD_FIELD("normalise", " h2o ", "none visible", false, keep.normalise),
    LONGKV_REAL_FIELD("beta", " pyramidkv ", 1, 1000, false, keep.beta),
    LONGKV_WORD_FIELD("window_inside", " pyramidkv ", "false true", false, keep.window_inside),
    LONGKV_COUNT_FIELD("future", kExpected, 1, 65536, false, keep.future),
    LONGKV_WORD_FIELD("covariance", kExpected, "false true", false, keep.covariance),
    LONGKV_WORD_FIELD("value_norm", kExpected, "false true", false, keep.value_norm),
    LONGKV_REAL_FIELD("epsilon", kExpected, 0, 1, false, keep.epsilon),
    LONGKV_REAL_FIELD("safeguard", " adakv ", 0, 1, false, keep.safeguard),
    LONGKV_WORD_FIELD("mode", " adakv ", "mix min", false, keep.safeguard_mode),
    LONGKV_WORD_FIELD("normalise", " adakv ", "false true", false, keep.normalise_heads),
    LONGKV_TEXT_FIELD("gates", " duo ", true, keep.gates),
    LONGKV_REAL_FIELD("ratio", " duo ", 0, 1, true, keep.streaming_share),
    LONGKV_COUNT_FIELD("block", " keydiff ", 0, kMaxRecipeRows, false, keep.block),
    LONGKV_WORD_FIELD("key_weight", kSampling, "norm mass mean slimmer", false, keep.key_weight),
    LONGKV_WORD_FIELD("bias", kSampling, "entropy count fit", false, keep.merge_bias),
    LONGKV_WORD_FIELD("bias", " asymkv ", "entropy count", false, keep.merge_bias),
    LONGKV_WORD_FIELD("link_score", kSampling, "mass cost", false, keep.link_score),
    LONGKV_WORD_FIELD("norms", kSampling, "query pooled release", false, keep.norms),
    LONGKV_REAL_FIELD("gamma", kMerging, 0, 1e9, false, keep.gamma),
    LONGKV_COUNT_FIELD("max_count", kMerging, 0, 65535, false, keep.max_count),
    LONGKV_WORD_FIELD("links", kMerging, "disjoint chained", false, keep.links),
    LONGKV_WORD_FIELD("scope", kMerging, "head layer", false, keep.scope),
    LONGKV_COUNT_FIELD("clip", kMerging, 0, 65535, false, keep.clip),
    LONGKV_WORD_FIELD("count_factor", kMerging, "false true", false, keep.count_factor),
    LONGKV_WORD_FIELD("running", " kvslimmer asymkv ", "false true", false, keep.running),
    LONGKV_WORD_FIELD("rope", kMerging, "after before", false, keep.before_rope),
    LONGKV_WORD_FIELD("positions", kMerging, "absolute count", false, keep.count_positions),
    LONGKV_WORD_FIELD("reread", kMerging, "false true", false, keep.reread),
    LONGKV_REAL_FIELD("keep_ratio", " kvzip ", 0, 1, true, keep.keep_ratio),
    LONGKV_COUNT_FIELD("sink", " kvzip ", 0, kMaxRecipeRows, false, keep.sink),
    LONGKV_COUNT_FIELD("chunk", " kvzip ", 1, 1 << 20, false, keep.chunk),
    LONGKV_WORD_FIELD("layerwise", " kvzip ", "false true", false, keep.layerwise),
    LONGKV_REAL_FIELD("recovery", " fastgen ", 0, 1, true, keep.recovery),
    LONGKV_REAL_FIELD("heavy", " fastgen ", 0, 1, false, keep.heavy),
    LONGKV_REAL_FIELD("local", " fastgen ", 0, 1, false, keep.local),
    LONGKV_COUNT_FIELD("sink", " fastgen ", 0, kMaxRecipeRows, false, keep.sink),
};

const RecipePreset kPresets[] = {
    {"streaming", "keep=streaming"},
    {"h2o", "keep=h2o"},
    {"tova", "keep=tova"},
    {"snapkv", "keep=snapkv"},
    {"pyramidkv", "keep=pyramidkv"},
    {"keydiff", "keep=keydiff"},
    {"knorm", "keep=knorm"},
    {"adakv", "keep=adakv"},
    {"expected_attention", "keep=expected_attention"},
    {"duo", "keep=duo"},
    {"normmass", "keep=normmass"},
    {"kvslimmer", "keep=kvslimmer"},
    {"kvslimmer-release",
     "keep=kvslimmer(window=0,norms=release,links=chained,scope=layer,clip=5,count_factor=false,running=true,"
     "rope=before,positions=count,reread=true)"},
    {"asymkv", "keep=asymkv"},
    {"asymkv-release",
     "keep=asymkv(window=0,links=chained,scope=layer,clip=5,rope=before,positions=count,reread=true)"},
    {"kvzip", "keep=kvzip"},
    {"fastgen", "keep=fastgen"},
};

bool contains(const char* words, const char* word) {
  return std::string_view(words).find(fmt::format(" {} ", word)) != std::string_view::npos;
}

Status check_budget(const KeepSpec& keep) {
  const char* name = keep_kind_name(keep.kind);
  if (keep.budget == 0 && keep.keep_ratio == 0) {
    return fail(Code::kInvalidArgument,
                "keep={} needs a budget of rows or a share of the tokens seen; nearest legal: budget=2048, or "
                "keep_ratio=0.2",
                name);
  }
  const int64_t forced = keep.sink + (contains(kWindowed, name) ? keep.window : 0);
  if (keep.budget > 0 && keep.budget <= forced) {
    return fail(Code::kInvalidArgument,
                "keep={}: budget={} leaves no row to choose beside {} that always stay (sink={}, window={}); nearest "
                "legal: budget={}, or a smaller sink or window",
                name, keep.budget, forced, keep.sink, keep.window, forced + 1);
  }
  return {};
}

Status check_merging(const KeepSpec& keep) {
  const char* name = keep_kind_name(keep.kind);
  const bool slimmer = keep.key_weight == KeepKeyWeight::kSlimmer;
  if (keep.before_rope && (keep.merge_bias == KeepBias::kFit || keep.link_score == KeepLinkScore::kCost)) {
    return fail(Code::kInvalidArgument,
                "keep={}: bias=fit and link_score=cost foresee the scores of a mixed key, which follow from those of "
                "its parts only where keys are mixed after RoPE; nearest legal: rope=after",
                name);
  }
  if (keep.norms != KeepNorms::kQuery && !slimmer) {
    return fail(Code::kInvalidArgument,
                "keep={}: norms say how key_weight=slimmer measures distances, other weights have none; nearest legal: "
                "norms=query, or key_weight=slimmer",
                name);
  }
  if (keep.running && keep.kind == KeepKind::kKvslimmer && (!slimmer || keep.norms != KeepNorms::kRelease)) {
    return fail(Code::kInvalidArgument,
                "keep={}: running=true is a mean of the weights that key_weight=slimmer with norms=release gives rows; "
                "nearest legal: running=false, or these two",
                name);
  }
  if (keep.clip > 0 && keep.merge_bias != KeepBias::kCount) {
    return fail(Code::kInvalidArgument,
                "keep={}: clip={} ends counts, which count only with bias=count; nearest legal: clip=0, or bias=count",
                name, keep.clip);
  }
  return {};
}

Status validate(const Recipe& recipe) {
  const KeepSpec& keep = recipe.keep;
  const char* name = keep_kind_name(keep.kind);
  if (keep.kind == KeepKind::kStreaming && (!recipe.select.all || recipe.index.kind != IndexKind::kNone)) {
    return fail(
        Code::kInvalidArgument,
        "keep=streaming attends its sinks and window only, so there is nothing to choose; nearest legal recipes: "
        "keep=streaming(sink={},window={}) alone, or keep=all with this index and select",
        keep.sink, keep.window);
  }
  if (contains(" tova h2o ", name) && !recipe.select.all) {
    return fail(Code::kInvalidArgument,
                "keep={} evicts while decoding, which leaves an index behind; nearest legal recipes: keep={} alone, or "
                "keep=snapkv with this index and select",
                name, name);
  }
  if (contains(" adakv duo kvzip fastgen ", name) && !recipe.select.all) {
    return fail(Code::kInvalidArgument,
                "keep={} gives every head its own number of rows, an index needs them equal; nearest legal recipes: "
                "keep={} alone, or keep=snapkv with this index and select",
                name, name);
  }
  if (keep.kind == KeepKind::kDuo && keep.gates.empty()) {
    return fail(Code::kInvalidArgument,
                "keep=duo needs the gates of the model's heads: gates=FILE, as in duo:gates=full_attention_heads.tsv; "
                "nearest legal without one: streaming");
  }
  if (keep.kind == KeepKind::kAdakv && keep.scorer == KeepScorer::kSnapkv && keep.window == 0) {
    return fail(Code::kInvalidArgument,
                "keep=adakv(scorer=snapkv): window=0 leaves no query to score by; nearest "
                "legal: window=32, or scorer=expected");
  }
  if (keep.kind == KeepKind::kKvzip && keep.keep_ratio == 0) {
    return fail(Code::kInvalidArgument, "keep=kvzip: keep_ratio=0 keeps nothing; expected a share above 0, to 1");
  }
  if (contains(kBudgeted, name)) LONGKV_TRY(check_budget(keep));
  if (contains(kMerging, name)) LONGKV_TRY(check_merging(keep));
  if (contains(kVoted, name) && keep.kernel % 2 == 0) {
    return fail(Code::kInvalidArgument, "keep={}: kernel={} has no middle; nearest legal: kernel={}", name, keep.kernel,
                keep.kernel + 1);
  }
  return {};
}

}  // namespace

RecipeStageInfo keep_stage() {
  std::vector<std::string> names;
  for (const KeepKind kind : kKinds) names.emplace_back(keep_kind_name(kind));
  return {RecipeStage::kKeep,
          "keep",
          names,
          false,
          kFields,
          kPresets,
          [](const Recipe& r) { return std::string(keep_kind_name(r.keep.kind)); },
          [](Recipe& r, std::string_view choice) {
            for (const KeepKind kind : kKinds) {
              if (choice == keep_kind_name(kind)) r.keep = default_keep(kind);
            }
          },
          validate};
}

}  // namespace longkv
