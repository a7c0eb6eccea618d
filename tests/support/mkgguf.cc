#include "support/mkgguf.h"

#include <fstream>

#include "support/paths.h"

namespace longkv::test {

namespace {

void pad(std::string& bytes, uint64_t alignment) {
  while (bytes.size() % alignment != 0) bytes.push_back('\0');
}

}  // namespace

MkGguf& MkGguf::raw_pair(std::string_view key, uint32_t type, std::string_view payload) {
  pairs_.text(key).number(type).raw(payload);
  ++pairs_written_;
  return *this;
}

MkGguf& MkGguf::string(std::string_view key, std::string_view v) {
  return raw_pair(key, uint32_t(GgufType::kString), Bytes().text(v).str());
}

MkGguf& MkGguf::strings(std::string_view key, const std::vector<std::string>& v) {
  Bytes b;
  b.array(GgufType::kString, v.size());
  for (const std::string& s : v) b.text(s);
  return raw_pair(key, uint32_t(GgufType::kArray), b.str());
}

MkGguf& MkGguf::raw_record(std::string_view name, uint32_t type, const std::vector<uint64_t>& dims, uint64_t offset,
                           std::optional<uint32_t> n_dims) {
  records_.text(name).number(n_dims.value_or(uint32_t(dims.size())));
  for (uint64_t d : dims) records_.number(d);
  records_.number(type).number(offset);
  ++records_written_;
  return *this;
}

MkGguf& MkGguf::tensor(std::string_view name, TensorType type, const std::vector<uint64_t>& dims,
                       std::string_view data) {
  pad(data_, alignment);
  raw_record(name, uint32_t(type), dims, data_.size());
  data_.append(data);
  return *this;
}

MkGguf& MkGguf::zeros(std::string_view name, TensorType type, const std::vector<uint64_t>& dims) {
  const TensorTypeInfo* info = tensor_type_info(type);
  uint64_t elements = 1;
  for (uint64_t d : dims) elements *= d;
  return tensor(name, type, dims,
                std::string(elements / uint64_t(info->block_values) * uint64_t(info->block_bytes), '\0'));
}

MkGguf& MkGguf::f32_tensor(std::string_view name, const std::vector<uint64_t>& dims, const std::vector<float>& values) {
  return tensor(name, TensorType::kF32, dims,
                {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
}

std::string MkGguf::bytes() const {
  Bytes head;
  head.raw(magic).number(version).number(tensor_count.value_or(records_written_));
  head.number(pair_count.value_or(pairs_written_)).raw(pairs_.str()).raw(records_.str());
  std::string out = head.str();
  pad(out, alignment);
  return out + data_ + trailing;
}

std::string MkGguf::write(const std::string& name) const { return write_temp(name, bytes()); }

std::string write_temp(const std::string& name, std::string_view content) {
  const std::string path = temp_path(name);
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(content.data(), std::streamsize(content.size()));
  return path;
}

}  // namespace longkv::test
