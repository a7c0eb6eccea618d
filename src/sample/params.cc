#include "sample/params.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace longkv {

namespace {

constexpr std::pair<std::string_view, SamplerStage> kStages[] = {
    {"penalties", SamplerStage::kPenalties}, {"top_k", SamplerStage::kTopK},
    {"typ_p", SamplerStage::kTypical},       {"top_p", SamplerStage::kTopP},
    {"min_p", SamplerStage::kMinP},          {"temperature", SamplerStage::kTemperature},
};

}  // namespace

Result<std::vector<SamplerStage>> parse_sampler_stages(std::string_view text) {
  std::vector<SamplerStage> stages;
  while (!text.empty()) {
    const size_t end = text.find_first_of(";,");
    const std::string_view name = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    bool found = false;
    for (const auto& [n, stage] : kStages) {
      if (n != name) continue;
      stages.push_back(stage);
      found = true;
    }
    if (!found) {
      std::string known;
      for (const auto& [n, stage] : kStages) known += (known.empty() ? "" : ", ") + std::string(n);
      return fail(Code::kInvalidArgument, "sampler '{}' is not known; known are {}", name, known);
    }
  }
  return stages;
}

Result<std::pair<int32_t, float>> parse_logit_bias(std::string_view text) {
  int32_t id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
  const std::string_view rest = text.substr(size_t(end - text.data()));
  if (error != std::errc() || id < 0 || rest.size() < 2 || (rest[0] != '+' && rest[0] != '-')) {
    return fail(Code::kInvalidArgument, "logit bias '{}' must look like ID+BIAS or ID-BIAS", text);
  }
  float bias = 0.0f;
  const std::string_view number = rest.substr(1);
  if (number == "inf") {
    bias = std::numeric_limits<float>::infinity();
  } else {
    const auto [last, number_error] = std::from_chars(number.data(), number.data() + number.size(), bias);
    if (number_error != std::errc() || last != number.data() + number.size() || !std::isfinite(bias)) {
      return fail(Code::kInvalidArgument, "logit bias '{}' must look like ID+BIAS or ID-BIAS", text);
    }
  }
  return std::pair<int32_t, float>(id, rest[0] == '-' ? -bias : bias);
}

Status validate(const SamplingParams& p) {
  auto in_range = [](float v, float low, float high) { return v >= low && v <= high; };  // false for NaN
  if (!in_range(p.temperature, -kMostTemperature, kMostTemperature)) {
    return fail(Code::kInvalidArgument, "--temp {} must lie in [{}, {}]; 0 and below choose the best token",
                p.temperature, -kMostTemperature, kMostTemperature);
  }
  if (!in_range(p.top_p, 0.0f, 1.0f)) return fail(Code::kInvalidArgument, "--top-p {} must lie in [0, 1]", p.top_p);
  if (!in_range(p.min_p, 0.0f, 1.0f)) return fail(Code::kInvalidArgument, "--min-p {} must lie in [0, 1]", p.min_p);
  if (!in_range(p.typical, 0.0f, 1.0f))
    return fail(Code::kInvalidArgument, "--typical {} must lie in [0, 1]", p.typical);
  if (!(p.repeat_penalty > 0.0f) || !std::isfinite(p.repeat_penalty)) {
    return fail(Code::kInvalidArgument, "--repeat-penalty {} must be positive", p.repeat_penalty);
  }
  if (!std::isfinite(p.presence_penalty) || !std::isfinite(p.frequency_penalty)) {
    return fail(Code::kInvalidArgument, "presence and frequency penalties must be finite numbers");
  }
  if (p.repeat_last_n < -1)
    return fail(Code::kInvalidArgument, "--repeat-last-n {} must be -1 or more", p.repeat_last_n);
  return {};
}

}  // namespace longkv
