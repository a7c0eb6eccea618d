#include "kv/keep/spec.h"

#include <algorithm>

namespace longkv {

namespace {
// In the order of KeepKind.
constexpr const char* kNames[] = {"all",       "streaming", "knorm",   "keydiff",   "random",
                                  "snapkv",    "tova",      "h2o",     "pyramidkv", "expected_attention",
                                  "adakv",     "duo",       "fastgen", "kvzip",     "normmass",
                                  "kvslimmer", "asymkv"};
}  // namespace

const char* keep_kind_name(KeepKind kind) { return kNames[size_t(kind)]; }

KeepSpec default_keep(KeepKind kind) {
  KeepSpec spec;
  spec.kind = kind;
  spec.budget = 2048;
  switch (kind) {
    case KeepKind::kAll: spec.budget = 0; break;
    case KeepKind::kStreaming:  // 4 sinks and a cache of 2048 rows
      spec.budget = 0;
      spec.sink = 4;
      spec.window = 2044;
      break;
    case KeepKind::kKnorm:
    case KeepKind::kKeydiff:
    case KeepKind::kRandom: break;
    case KeepKind::kSnapkv:  // the configuration of all published LongBench results
    case KeepKind::kPyramidkv:
    case KeepKind::kAdakv: spec.window = 32; break;
    case KeepKind::kTova: spec.sink = 4; break;
    case KeepKind::kH2o:
      spec.budget = 0;
      spec.keep_ratio = 0.2;
      break;
    case KeepKind::kExpectedAttention: spec.sink = 4; break;
    case KeepKind::kDuo:
      spec.budget = 0;
      spec.sink = 64;
      spec.window = 256;
      break;
    case KeepKind::kFastgen:
      spec.budget = 0;
      spec.sink = 4;
      break;
    case KeepKind::kKvzip:
      spec.budget = 0;
      spec.keep_ratio = 0.3;
      spec.sink = 4;
      break;
    case KeepKind::kNormmass:
      spec.sink = 32;
      spec.window = 32;
      spec.link_score = KeepLinkScore::kCost;
      spec.max_count = 0;
      break;
    case KeepKind::kKvslimmer:
    case KeepKind::kAsymkv:  // 2048 rows beside the sinks
      spec.budget = 2080;
      spec.sink = 32;
      spec.window = 32;
      spec.key_weight = kind == KeepKind::kAsymkv ? KeepKeyWeight::kMean : KeepKeyWeight::kSlimmer;
      spec.running = kind == KeepKind::kAsymkv;
      spec.merge_bias = KeepBias::kCount;
      spec.gamma = 656.6;  // 4096 / ln 512
      spec.max_count = 0;
      break;
  }
  return spec;
}

int64_t keep_budget(const KeepSpec& spec, int64_t tokens) {
  if (spec.budget > 0) return spec.budget;
  return std::max(int64_t(double(tokens) * spec.keep_ratio), spec.sink + spec.window);
}

}  // namespace longkv
