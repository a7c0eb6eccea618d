#include "gguf/gguf.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "gguf/parse.h"
#include "gguf/printable.h"
#include "gguf/split.h"

namespace longkv {

namespace {

struct OpenShard {
  MappedFile file;
  GgufShard content;
};

Result<OpenShard> open_shard(const std::string& path) {
  OpenShard shard;
  LONGKV_ASSIGN(shard.file, MappedFile::open(path));
  auto content = parse_gguf(shard.file.bytes());
  if (!content.ok()) return content.status().with_context(path);
  shard.content = std::move(content).value();
  return shard;
}

// Where the other files of a split model lie. Errors: kInvalidArgument when `path` is not the first file.
Result<std::string> first_shard_prefix(const std::string& path, const SplitInfo& split) {
  const auto prefix = split_prefix(path, split.number, split.count);
  if (split.number != 0) {
    const std::string first =
        prefix ? split_path(*prefix, 0, split.count) : fmt::format("NAME-00001-of-{:05}.gguf", split.count);
    return fail(Code::kInvalidArgument, "{}: this is file {} of a model split into {}; open the first one, '{}'", path,
                split.number + 1, split.count, first);
  }
  if (!prefix) {
    return fail(
        Code::kInvalidArgument,
        "{}: a model split into {} files, so its name must end in '-00001-of-{:05}.gguf' and the others lie beside it",
        path, split.count, split.count);
  }
  return *prefix;
}

// A further file mostly has no metadata but its place; what it repeats of the first file's must be the same.
Status check_same_model(const std::string& path, const Metadata& first, const Metadata& further) {
  for (const auto& [key, value] : further.all()) {
    const auto it = first.all().find(key);
    if (key.starts_with("split.") || it == first.all().end()) continue;
    const GgufValue& known = it->second;
    const bool same = known.type == value.type && known.element_type == value.element_type &&
                      known.count == value.count &&
                      std::equal(known.bytes.begin(), known.bytes.end(), value.bytes.begin(), value.bytes.end());
    if (!same) {
      return fail(Code::kCorrupt, "{}: key '{}' is not what the first file says; is it part of another model?", path,
                  printable(key));
    }
  }
  return {};
}

Result<OpenShard> open_further_shard(const std::string& path, int64_t number, int64_t count) {
  auto shard = open_shard(path);
  if (!shard.ok()) return shard.status().with_context(fmt::format("file {} of {} of a split model", number + 1, count));
  auto info = read_split_info(shard->content.metadata);
  if (!info.ok()) return info.status().with_context(path);
  if (info->number != number || info->count != count) {
    return fail(Code::kCorrupt, "{}: says it is file {} of {}; expected file {} of {} of the same model", path,
                info->number + 1, info->count, number + 1, count);
  }
  return shard;
}

}  // namespace

Result<GgufFile> GgufFile::open(const std::string& path) {
  LONGKV_ASSIGN(OpenShard first, open_shard(path));
  auto split = read_split_info(first.content.metadata);
  if (!split.ok()) return split.status().with_context(path);

  GgufFile file;
  file.path_ = path;
  file.version_ = first.content.version;
  file.metadata_ = std::move(first.content.metadata);
  file.tensors_ = std::move(first.content.tensors);
  file.shards_.push_back(std::move(first.file));
  if (split->count > 1) {
    LONGKV_ASSIGN(const std::string prefix, first_shard_prefix(path, *split));
    for (int64_t number = 1; number < split->count; ++number) {
      LONGKV_ASSIGN(OpenShard next, open_further_shard(split_path(prefix, number, split->count), number, split->count));
      LONGKV_TRY(check_same_model(split_path(prefix, number, split->count), file.metadata_, next.content.metadata));
      std::move(next.content.tensors.begin(), next.content.tensors.end(), std::back_inserter(file.tensors_));
      file.shards_.push_back(std::move(next.file));
    }
    if (split->tensors >= 0 && uint64_t(split->tensors) != file.tensors_.size()) {
      return fail(Code::kCorrupt, "{}: split.tensors.count is {}, but the {} files hold {} tensors", path,
                  split->tensors, split->count, file.tensors_.size());
    }
  }
  for (size_t i = 0; i < file.tensors_.size(); ++i) {
    if (!file.by_name_.emplace(file.tensors_[i].name, i).second) {
      return fail(Code::kCorrupt, "{}: tensor '{}' appears in two files of the split model", path,
                  printable(file.tensors_[i].name));
    }
  }
  return file;
}

uint64_t GgufFile::file_bytes() const {
  uint64_t total = 0;
  for (const MappedFile& shard : shards_) total += shard.bytes().size();
  return total;
}

const TensorInfo* GgufFile::find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

}  // namespace longkv
