#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "model/families/families.h"
#include "model/settings.h"

namespace longkv {

namespace {

constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxWidth = int64_t(1) << 20;
constexpr double kMaxFactor = 1e6;  // of anything that scales; far above what any model has, far below fp32's range

// A scalar, or an array that must be the same number in every layer.
Result<int64_t> uniform(const Metadata& m, const std::string& key, int64_t layers, int64_t min, int64_t max) {
  LONGKV_ASSIGN(const std::vector<int64_t> values, m.integers(key, layers, min, max));
  for (int64_t v : values) {
    if (v != values.front()) {
      return fail(Code::kUnsupported, "'{}' differs between layers ({} and {}); longkv needs layers of one shape", key,
                  values.front(), v);
    }
  }
  return values.front();
}

const char* scaling_name(RopeScaling s) {
  switch (s) {
    case RopeScaling::kNone: return "none";
    case RopeScaling::kLinear: return "linear";
    case RopeScaling::kNtk: return "ntk";
    case RopeScaling::kYarn: return "yarn";
    case RopeScaling::kLongRope: return "longrope";
  }
  return "?";
}

// A scaling key that is read by nobody would mean a silently wrong model at depth.
Status refuse_unknown_rope_keys(const Metadata& m, const std::string& prefix) {
  static const std::set<std::string, std::less<>> known = {"dimension_count",
                                                           "freq_base",
                                                           "freq_base_swa",
                                                           "scale_linear",
                                                           "scaling.type",
                                                           "scaling.factor",
                                                           "scaling.attn_factor",
                                                           "scaling.original_context_length",
                                                           "scaling.finetuned",
                                                           "scaling.yarn_beta_fast",
                                                           "scaling.yarn_beta_slow",
                                                           "scaling.yarn_ext_factor",
                                                           "scaling.yarn_attn_factor"};
  for (const auto& [key, value] : m.all()) {
    if (key.rfind(prefix, 0) == 0 && known.count(key.substr(prefix.size())) == 0) {
      return fail(Code::kUnsupported, "RoPE setting '{}' is not known to longkv and would be ignored", key);
    }
  }
  return {};
}

Status read_rope(const Metadata& m, const std::string& arch, ModelConfig& c) {
  const std::string p = arch + ".rope.";
  LONGKV_TRY(refuse_unknown_rope_keys(m, p));
  LONGKV_ASSIGN(const int64_t dim, m.integer_or(p + "dimension_count", 2, c.head_dim_k, c.head_dim_k));
  if (dim % 2 != 0) return fail(Code::kCorrupt, "'{}dimension_count' is {}, must be even", p, dim);
  c.rope.dim = int(dim);
  LONGKV_ASSIGN(c.rope.base, real_within(m, p + "freq_base", kMinRopeBase, kMaxRopeBase, 10000.0));

  LONGKV_ASSIGN(const std::string type, m.string_or(p + "scaling.type", m.has(p + "scale_linear") ? "linear" : "none"));
  LONGKV_ASSIGN(const double old_factor, m.real_or(p + "scale_linear", 1.0));
  LONGKV_ASSIGN(c.rope.factor, real_within(m, p + "scaling.factor", 1.0 / kMaxFactor, kMaxFactor, old_factor));
  if (type == "none") {
    c.rope.scaling = RopeScaling::kNone;
  } else if (type == "linear") {
    c.rope.scaling = c.rope.factor == 1.0 ? RopeScaling::kNone : RopeScaling::kLinear;
  } else if (type == "yarn") {
    c.rope.scaling = RopeScaling::kYarn;
  } else if (type == "longrope" || type == "su") {
    c.rope.scaling = RopeScaling::kLongRope;
  } else {
    return fail(Code::kUnsupported, "RoPE scaling type '{}' is not known; known are none, linear, yarn, longrope",
                type);
  }
  LONGKV_ASSIGN(c.rope.original_context,
                m.integer_or(p + "scaling.original_context_length", 1, int64_t(1) << 40, c.context));
  LONGKV_ASSIGN(const double yarn_attn, m.real_or(p + "scaling.yarn_attn_factor", 0.0));
  LONGKV_ASSIGN(c.rope.attn_factor, real_within(m, p + "scaling.attn_factor", 0.0, kMaxFactor, yarn_attn));
  LONGKV_ASSIGN(c.rope.beta_fast, real_within(m, p + "scaling.yarn_beta_fast", 1.0 / kMaxFactor, kMaxFactor, 32.0));
  LONGKV_ASSIGN(c.rope.beta_slow, real_within(m, p + "scaling.yarn_beta_slow", 1.0 / kMaxFactor, kMaxFactor, 1.0));
  LONGKV_ASSIGN(const double ext, m.real_or(p + "scaling.yarn_ext_factor", 1.0));
  if (ext != 1.0) return fail(Code::kUnsupported, "'{}scaling.yarn_ext_factor' is {}; only 1 is implemented", p, ext);
  return {};
}

Status apply_overrides(const RopeOverrides& o, ModelConfig& c) {
  auto changed = [](const char* what, const std::string& old_value, const std::string& new_value) {
    log_info("rope: {} {} -> {} (override)", what, old_value, new_value);
  };
  if (o.scaling) {
    changed("scaling", scaling_name(c.rope.scaling), scaling_name(*o.scaling));
    if (*o.scaling == RopeScaling::kLongRope && c.rope.scaling != RopeScaling::kLongRope) {
      return fail(Code::kInvalidArgument, "--rope-scaling longrope needs factors in the model file, which has none");
    }
    c.rope.scaling = *o.scaling;
  }
  if (o.base) {
    if (!(*o.base >= kMinRopeBase && *o.base <= kMaxRopeBase))
      return fail(Code::kInvalidArgument, "--rope-freq-base {} must be a number above 1, at most {}", *o.base,
                  kMaxRopeBase);
    changed("base", fmt::format("{}", c.rope.base), fmt::format("{}", *o.base));
    c.rope.base = *o.base;
  }
  if (o.factor) {
    if (!(*o.factor >= 1.0 / kMaxFactor && *o.factor <= kMaxFactor))
      return fail(Code::kInvalidArgument, "--rope-scale {} must be a positive number from {} to {}", *o.factor,
                  1.0 / kMaxFactor, kMaxFactor);
    if (c.rope.scaling == RopeScaling::kNone) {
      return fail(Code::kInvalidArgument, "--rope-scale needs --rope-scaling linear, ntk or yarn");
    }
    changed("scale", fmt::format("{}", c.rope.factor), fmt::format("{}", *o.factor));
    c.rope.factor = *o.factor;
  }
  if (o.scaling && !o.factor && c.rope.factor == 1.0 && *o.scaling != RopeScaling::kNone &&
      *o.scaling != RopeScaling::kLongRope) {
    return fail(Code::kInvalidArgument, "--rope-scaling {} needs a factor: --rope-scale N", scaling_name(*o.scaling));
  }
  if (o.original_context) {
    if (*o.original_context < 1) return fail(Code::kInvalidArgument, "--yarn-orig-ctx must be at least 1");
    if (c.rope.scaling != RopeScaling::kYarn && c.rope.scaling != RopeScaling::kLongRope) {
      return fail(Code::kInvalidArgument,
                  "--yarn-orig-ctx has no meaning for rope scaling '{}'; it needs yarn or longrope",
                  scaling_name(c.rope.scaling));
    }
    changed("original context", std::to_string(c.rope.original_context), std::to_string(*o.original_context));
    c.rope.original_context = *o.original_context;
  }
  return {};
}

}  // namespace

KvShape ModelConfig::kv_shape() const {
  KvShape s;
  s.layers = layers;
  s.kv_heads = kv_heads;
  s.group_size = heads / kv_heads;
  s.dim_k = head_dim_k;
  s.dim_v = head_dim_v;
  s.window = window;
  return s;
}

Result<ModelConfig> read_model_config(const GgufFile& file, const RopeOverrides& overrides) {
  const Metadata& m = file.metadata();
  LONGKV_ASSIGN(const std::string_view arch_view, m.string("general.architecture"));
  const std::string arch(arch_view);
  const Family* family = find_family(arch);
  if (family == nullptr) {
    std::string known;
    for (const Family& f : families()) known += (known.empty() ? "" : ", ") + std::string(f.name);
    return fail(Code::kUnsupported, "model family '{}' is not known; known are {}", arch, known);
  }

  ModelConfig c;
  c.family = arch;
  LONGKV_ASSIGN(c.name, m.string_or("general.name", arch));
  LONGKV_ASSIGN(const int64_t experts, m.integer_or(arch + ".expert_count", 0, 1 << 20, 0));
  if (experts > 0) return fail(Code::kUnsupported, "mixture-of-experts models ({} experts) are not supported", experts);
  LONGKV_ASSIGN(c.layers, m.integer(arch + ".block_count", 1, kMaxLayers));
  LONGKV_ASSIGN(c.dim, m.integer(arch + ".embedding_length", 1, kMaxWidth));
  LONGKV_ASSIGN(c.context, m.integer(arch + ".context_length", 1, int64_t(1) << 40));
  LONGKV_ASSIGN(c.ff_dim, uniform(m, arch + ".feed_forward_length", c.layers, 1, kMaxWidth * 16));
  LONGKV_ASSIGN(c.heads, uniform(m, arch + ".attention.head_count", c.layers, 1, 65536));
  c.kv_heads = c.heads;
  if (m.has(arch + ".attention.head_count_kv")) {
    LONGKV_ASSIGN(c.kv_heads, uniform(m, arch + ".attention.head_count_kv", c.layers, 1, 65536));
  }
  if (c.heads % c.kv_heads != 0) {
    return fail(Code::kCorrupt, "{} query heads cannot share {} KV heads evenly", c.heads, c.kv_heads);
  }
  if (!m.has(arch + ".attention.key_length") && c.dim % c.heads != 0) {
    return fail(Code::kCorrupt, "width {} is not a multiple of {} heads and no key length is given", c.dim, c.heads);
  }
  LONGKV_ASSIGN(c.head_dim_k, m.integer_or(arch + ".attention.key_length", 1, 65536, c.dim / c.heads));
  LONGKV_ASSIGN(c.head_dim_v, m.integer_or(arch + ".attention.value_length", 1, 65536, c.dim / c.heads));
  const std::string eps_key = arch + ".attention.layer_norm_rms_epsilon";
  LONGKV_TRY(m.real(eps_key).status());
  LONGKV_ASSIGN(const double eps, real_within(m, eps_key, 0.0, 1.0, 0.0));
  c.norm_eps = float(eps);
  LONGKV_ASSIGN(const double cap, real_within(m, arch + ".attn_logit_softcapping", 0.0, kMaxFactor, 0.0));
  c.attn_softcap = float(cap);
  LONGKV_ASSIGN(const double final_cap, real_within(m, arch + ".final_logit_softcapping", 0.0, kMaxFactor, 0.0));
  c.final_softcap = float(final_cap);
  c.attn_scale = 1.0f / std::sqrt(float(c.head_dim_k));
  LONGKV_TRY(read_rope(m, arch, c));
  LONGKV_TRY(family->configure(m, c));
  LONGKV_ASSIGN(const double scale, real_within(m, arch + ".attention.scale", 0.0, kMaxFactor, 0.0));
  if (scale > 0.0) c.attn_scale = float(scale);  // 0: as usual
  LONGKV_TRY(report_unread_settings(m, *family));
  LONGKV_TRY(apply_overrides(overrides, c));
  return c;
}

}  // namespace longkv
