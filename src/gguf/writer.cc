#include "gguf/writer.h"

#include <algorithm>
#include <optional>

#include "base/atomic_file.h"
#include "base/checked.h"
#include "base/error.h"
#include "gguf/printable.h"

namespace longkv {

namespace {

template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_text(std::string& out, std::string_view text) {
  append<uint64_t>(out, text.size());
  out.append(text);
}

std::span<const uint8_t> as_bytes(const std::string& s) {
  return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
}

// Zero bytes that bring `position` to a multiple of the alignment.
std::string padding(uint64_t position) { return std::string(size_t(-position % kGgufDefaultAlignment), '\0'); }

}  // namespace

Status GgufWriter::begin_pair(std::string_view key, GgufType type) {
  if (key.empty() || key.size() > kGgufMaxKey) {
    return fail(Code::kInvalidArgument, "a key of {} bytes; expected 1 to {}", key.size(), kGgufMaxKey);
  }
  if (std::find(keys_.begin(), keys_.end(), key) != keys_.end()) {
    return fail(Code::kInvalidArgument, "key '{}' was already given", printable(key));
  }
  keys_.emplace_back(key);
  append_text(pairs_, key);
  append(pairs_, uint32_t(type));
  return {};
}

template <class T>
Status GgufWriter::add_number(std::string_view key, GgufType type, T value) {
  LONGKV_TRY(begin_pair(key, type));
  append(pairs_, value);
  return {};
}

template <class T>
Status GgufWriter::add_numbers(std::string_view key, GgufType element, std::span<const T> values) {
  LONGKV_TRY(begin_pair(key, GgufType::kArray));
  append(pairs_, uint32_t(element));
  append<uint64_t>(pairs_, values.size());
  for (const T value : values) append(pairs_, value);
  return {};
}

template Status GgufWriter::add_number(std::string_view, GgufType, uint8_t);
template Status GgufWriter::add_number(std::string_view, GgufType, uint32_t);
template Status GgufWriter::add_number(std::string_view, GgufType, int32_t);
template Status GgufWriter::add_number(std::string_view, GgufType, uint64_t);
template Status GgufWriter::add_number(std::string_view, GgufType, int64_t);
template Status GgufWriter::add_number(std::string_view, GgufType, float);
template Status GgufWriter::add_number(std::string_view, GgufType, double);
template Status GgufWriter::add_numbers(std::string_view, GgufType, std::span<const int32_t>);
template Status GgufWriter::add_numbers(std::string_view, GgufType, std::span<const uint32_t>);
template Status GgufWriter::add_numbers(std::string_view, GgufType, std::span<const float>);

Status GgufWriter::add_string(std::string_view key, std::string_view value) {
  LONGKV_TRY(begin_pair(key, GgufType::kString));
  append_text(pairs_, value);
  return {};
}

Status GgufWriter::add_strings(std::string_view key, std::span<const std::string> values) {
  LONGKV_TRY(begin_pair(key, GgufType::kArray));
  append(pairs_, uint32_t(GgufType::kString));
  append<uint64_t>(pairs_, values.size());
  for (const std::string& value : values) append_text(pairs_, value);
  return {};
}

Status GgufWriter::add_tensor(std::string_view name, TensorType type, std::span<const int64_t> dims,
                              std::span<const uint8_t> data) {
  const auto refuse = [&](const std::string& why) {
    return fail(Code::kInvalidArgument, "tensor '{}': {}", printable(name), why);
  };
  if (name.empty() || name.size() > kGgufMaxTensorName) {
    return refuse(fmt::format("a name of {} bytes; expected 1 to {}", name.size(), kGgufMaxTensorName));
  }
  if (std::any_of(tensors_.begin(), tensors_.end(), [&](const Tensor& t) { return t.name == name; })) {
    return refuse("the name was already given");
  }
  if (dims.empty() || dims.size() > size_t(kGgufMaxDims)) {
    return refuse(fmt::format("{} dimensions; expected 1 to {}", dims.size(), kGgufMaxDims));
  }
  LONGKV_ASSIGN(const int64_t row, row_bytes(type, dims[0]));
  std::optional<uint64_t> bytes = uint64_t(row);
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] <= 0) return refuse(fmt::format("dimension {} is {}", d, dims[d]));
    if (d > 0 && bytes) bytes = checked_mul(*bytes, uint64_t(dims[d]));
  }
  if (!bytes || *bytes != data.size()) {
    return refuse(fmt::format("{} bytes of data do not fit its dimensions", data.size()));
  }
  const uint64_t offset = data_end_ + padding(data_end_).size();
  append_text(records_, name);
  append(records_, uint32_t(dims.size()));
  for (const int64_t d : dims) append(records_, uint64_t(d));
  append(records_, uint32_t(type));
  append(records_, offset);
  tensors_.push_back({std::string(name), offset, data});
  data_end_ = offset + *bytes;
  return {};
}

Status GgufWriter::write(const std::string& path) const {
  std::string head = "GGUF";
  append<uint32_t>(head, 3);
  append<uint64_t>(head, tensors_.size());
  append<uint64_t>(head, keys_.size());
  head += pairs_;
  head += records_;
  head += padding(head.size());
  LONGKV_ASSIGN(AtomicFile file, AtomicFile::create(path));
  LONGKV_TRY(file.write(as_bytes(head)));
  for (const Tensor& t : tensors_) {
    LONGKV_TRY(
        file.write(as_bytes(padding(file.position()))));  // head.size() is aligned, so positions and offsets agree
    LONGKV_TRY(file.write(t.data));
  }
  return file.commit();
}

}  // namespace longkv
