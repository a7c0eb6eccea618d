// Names and keys of models that are split over several files: NAME-00001-of-00003.gguf and so on.
#pragma once

#include <optional>
#include <string>

#include "gguf/metadata.h"
#include "longkv/status.h"

namespace longkv {

struct SplitInfo {
  int64_t number = 0;    // of this file, from 0
  int64_t count = 1;     // files; 1 for a model in one file
  int64_t tensors = -1;  // in all files together; -1 when not recorded
};

// Errors: kCorrupt when the keys are of a wrong type or contradict each other.
Result<SplitInfo> read_split_info(const Metadata& metadata);

// "dir/model-00002-of-00003.gguf" -> "dir/model" when the numbers are `number` + 1 and `count`; nullopt otherwise.
std::optional<std::string> split_prefix(const std::string& path, int64_t number, int64_t count);
std::string split_path(const std::string& prefix, int64_t number, int64_t count);

}  // namespace longkv
