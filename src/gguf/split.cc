#include "gguf/split.h"

#include "base/error.h"

namespace longkv {

namespace {

std::string suffix(int64_t number, int64_t count) { return fmt::format("-{:05}-of-{:05}.gguf", number + 1, count); }

}  // namespace

Result<SplitInfo> read_split_info(const Metadata& metadata) {
  constexpr int64_t kMaxFiles = 65535;  // the keys are 16-bit in the format
  SplitInfo info;
  LONGKV_ASSIGN(info.count, metadata.integer_or("split.count", 0, kMaxFiles, 1));
  if (info.count <= 1) {
    // Merging tools leave a count of 0 behind.
    info.count = 1;
    return info;
  }
  LONGKV_ASSIGN(info.number, metadata.integer("split.no", 0, kMaxFiles));
  LONGKV_ASSIGN(info.tensors, metadata.integer_or("split.tensors.count", 0, INT32_MAX, -1));
  if (info.number >= info.count) {
    return fail(Code::kCorrupt, "split.no is {} of {} files", info.number, info.count);
  }
  return info;
}

std::optional<std::string> split_prefix(const std::string& path, int64_t number, int64_t count) {
  const std::string end = suffix(number, count);
  if (path.size() <= end.size() || !path.ends_with(end)) return std::nullopt;
  return path.substr(0, path.size() - end.size());
}

std::string split_path(const std::string& prefix, int64_t number, int64_t count) {
  return prefix + suffix(number, count);
}

}  // namespace longkv
