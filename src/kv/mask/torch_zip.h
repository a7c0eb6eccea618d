// The numbers of tensors that torch.save wrote: a zip archive of stored (not compressed) entries. Nothing is unpickled:
// only the raw storages are read, in order, and the element type is taken from its name in the pickle.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "longkv/status.h"

namespace longkv {

bool is_zip(std::span<const uint8_t> file);

// All storages one after the other, as fp32. Errors: kCorrupt, kUnsupported (compressed, another element type).
Result<std::vector<float>> read_torch_floats(std::span<const uint8_t> file);

// A file that torch.load reads as one fp32 tensor of three dimensions.
std::vector<uint8_t> write_torch_floats(std::span<const float> values, const int64_t (&dims)[3]);

}  // namespace longkv
