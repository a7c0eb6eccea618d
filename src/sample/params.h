// Sampling settings. Names and defaults are llama.cpp's, so that a comparison at default settings is fair.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "longkv/status.h"

namespace longkv {

enum class SamplerStage { kPenalties, kTopK, kTypical, kTopP, kMinP, kTemperature };

constexpr float kMostTemperature = 100;  // by size: -100 to 100

struct SamplingParams {
  float temperature = 0.8f;  // 0 or below: greedy, ties to the lower id
  int64_t top_k = 40;        // 0 or below: off
  float top_p = 0.95f;       // 1: off
  float min_p = 0.05f;       // 0: off
  float typical = 1.0f;      // 1: off
  float repeat_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  int64_t repeat_last_n = 64;                         // tokens that penalties look back on; -1 = all, 0 = off
  std::vector<std::pair<int32_t, float>> logit_bias;  // added before everything else; -inf forbids a token
  std::vector<SamplerStage> stages = {SamplerStage::kPenalties, SamplerStage::kTopK, SamplerStage::kTypical,
                                      SamplerStage::kTopP,      SamplerStage::kMinP, SamplerStage::kTemperature};
  uint64_t seed = 0;
};

// "penalties;top_k;typ_p;top_p;min_p;temperature", separated by ';' or ','.
// Errors: kInvalidArgument naming the unknown stage and the known ones.
Result<std::vector<SamplerStage>> parse_sampler_stages(std::string_view text);
// "ID+BIAS" or "ID-BIAS", e.g. "15043+1.5", "2-inf".
Result<std::pair<int32_t, float>> parse_logit_bias(std::string_view text);
// Errors: kInvalidArgument for values without meaning (NaN, negative probabilities) or out of range.
Status validate(const SamplingParams& params);

}  // namespace longkv
