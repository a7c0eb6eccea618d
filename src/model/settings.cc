#include "model/settings.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/log.h"
#include "gguf/format.h"
#include "gguf/printable.h"

namespace longkv {

namespace {

// Read in config.cc, or of no weight for what is computed. RoPE settings have a list of their own.
constexpr std::string_view kKnown[] = {"attention.head_count",
                                       "attention.head_count_kv",
                                       "attention.key_length",
                                       "attention.layer_norm_epsilon",
                                       "attention.layer_norm_rms_epsilon",
                                       "attention.scale",
                                       "attention.value_length",
                                       "attn_logit_softcapping",
                                       "block_count",
                                       "context_length",
                                       "embedding_length",
                                       "expert_count",
                                       "feed_forward_length",
                                       "final_logit_softcapping",
                                       "vocab_size"};

// Part of the computation wherever they stand, with the values that leave it as it is.
struct Unbuilt {
  std::string_view key;
  std::array<double, 2> neutral;
};
constexpr Unbuilt kUnbuilt[] = {
    {"attention.causal", {1, 1}},
    {"attention.clamp_kqv", {0, 0}},
    {"attention.max_alibi_bias", {0, 0}},
    {"attention.shared_kv_layers", {0, 0}},
    {"attention.temperature_scale", {0, 0}},
    {"embedding_scale", {0, 1}},
    {"expert_used_count", {0, 0}},
    {"logit_scale", {0, 1}},
    {"residual_scale", {0, 1}},
    {"use_parallel_residual", {0, 0}},
};

template <class List>
bool contains(const List& list, std::string_view word) {
  return std::find(std::begin(list), std::end(list), word) != std::end(list);
}

// A number or bool as a double; nothing for other types.
std::optional<double> number_of(const Metadata& m, const std::string& key, const GgufValue& value) {
  if (value.type == uint32_t(GgufType::kBool)) return m.boolean(key).value() ? 1.0 : 0.0;
  if (const auto real = m.real(key); real.ok()) return *real;
  if (const auto integer = m.integer(key, INT64_MIN, INT64_MAX); integer.ok()) return double(*integer);
  return std::nullopt;
}

}  // namespace

Result<double> real_within(const Metadata& m, const std::string& key, double min, double max, double fallback) {
  LONGKV_ASSIGN(const double value, m.real_or(key, fallback));
  if (value >= min && value <= max) return value;
  return fail(Code::kCorrupt, "key '{}' is {}; expected a number from {} to {}", printable(key), value, min, max);
}

Status report_unread_settings(const Metadata& m, const Family& family) {
  const std::string prefix = std::string(family.name) + ".";
  int64_t unread = 0;
  std::string names;
  for (const auto& [key, value] : m.all()) {
    if (!key.starts_with(prefix) || key.starts_with(prefix + "rope.")) continue;
    const std::string_view name = std::string_view(key).substr(prefix.size());
    const auto* unbuilt =
        std::find_if(std::begin(kUnbuilt), std::end(kUnbuilt), [&](const Unbuilt& u) { return u.key == name; });
    if (unbuilt != std::end(kUnbuilt)) {
      const std::optional<double> number = number_of(m, key, value);
      if (number && (*number == unbuilt->neutral[0] || *number == unbuilt->neutral[1])) continue;
      return fail(Code::kUnsupported, "setting '{}' is {}, which longkv does not compute; its answers would be wrong",
                  printable(key), number ? fmt::format("{}", *number) : "no number");
    }
    if (contains(kKnown, name) || contains(family.keys, name)) continue;
    if (unread++ < 5) names += fmt::format("{}'{}'", names.empty() ? "" : ", ", printable(key));
  }
  if (unread == 0) return {};
  return notice(fmt::format("{} settings of the model file are not used by longkv: {}{}", unread, names,
                            unread > 5 ? " and others" : ""));
}

}  // namespace longkv
