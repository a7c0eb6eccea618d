// Numbers of a model file that the arithmetic takes over, and settings in it that longkv knows nothing of.
#pragma once

#include <string>

#include "gguf/metadata.h"
#include "longkv/status.h"
#include "model/families/families.h"

namespace longkv {

// What a RoPE base may be: above 1, and a number of fp32.
constexpr double kMinRopeBase = 1.000001, kMaxRopeBase = 1e30;

// A real number from `min` to `max`; `fallback` where the key is absent. Errors: kCorrupt.
Result<double> real_within(const Metadata& metadata, const std::string& key, double min, double max, double fallback);

// What a file of this family asks for and nobody reads. Errors: kUnsupported for a setting that is known to
// change what the model computes, unless its value says that it does not; everything else is one notice.
Status report_unread_settings(const Metadata& metadata, const Family& family);

}  // namespace longkv
