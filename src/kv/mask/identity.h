// Whether a mask or gates were learned for the model at hand.
#pragma once

#include <string>

namespace longkv {

// Empty when a file made for `learned` fits `model`, both identities (model/identity.h), names alone, or empty where
// unknown; else what differs, for a message.
std::string identity_difference(const std::string& learned, const std::string& model);

}  // namespace longkv
