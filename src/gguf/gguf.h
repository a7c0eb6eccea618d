// A GGUF model file (version 2 or 3), memory-mapped, one file or several shards.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "gguf/metadata.h"
#include "longkv/status.h"
#include "quant/tensor_type.h"

namespace longkv {

// A tensor inside the mapping. dims[0] is the contiguous dimension (input features of a weight matrix).
struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kF32;
  int n_dims = 0;
  std::array<int64_t, 4> dims = {1, 1, 1, 1};
  const uint8_t* data = nullptr;  // extent checked against the file
  uint64_t bytes = 0;

  int64_t elements() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
};

class GgufFile {
 public:
  // Opens `path`; for the first shard of a split model also all others. Every number is bounded before it is used.
  // Errors: kIo, kCorrupt, kUnsupported (a tensor type or version that longkv cannot read; names the tensor).
  static Result<GgufFile> open(const std::string& path);

  uint32_t version() const { return version_; }
  const std::string& path() const { return path_; }
  uint64_t file_bytes() const;  // of all shards
  const Metadata& metadata() const { return metadata_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // nullptr if absent

 private:
  std::string path_;
  uint32_t version_ = 0;
  std::vector<MappedFile> shards_;
  Metadata metadata_;  // of the first shard
  std::vector<TensorInfo> tensors_;
  std::map<std::string, size_t, std::less<>> by_name_;
};

}  // namespace longkv
