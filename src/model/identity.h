// What masks and gates learned for a model are bound to.
#pragma once

#include <string>

#include "model/config.h"

namespace longkv {

// The model's name, shape and rotary embedding; not its weights' types, so that what was learned serves every
// quantisation of a checkpoint.
std::string model_identity(const ModelConfig& config);

}  // namespace longkv
