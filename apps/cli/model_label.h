// How a model is called in result rows, and its size.
#pragma once

#include <cstdint>
#include <string>

#include "model/model.h"

namespace longkv::cli {

// "llama 135M Q4_1": family, parameters, the type that holds most weights.
std::string model_label(const LoadedModel& model);
uint64_t model_parameters(const LoadedModel& model);
uint64_t model_bytes(const LoadedModel& model);

}  // namespace longkv::cli
