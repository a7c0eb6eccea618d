// Any bytes as a model file: opened through the mapping, every value asked for through every getter, every tensor read.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "gguf/gguf.h"

namespace {

void read_everything(const longkv::GgufFile& file) {
  const longkv::Metadata& m = file.metadata();
  size_t answers = 0;
  for (const auto& [key, value] : m.all()) {
    answers += m.integer(key, INT64_MIN, INT64_MAX).ok();
    answers += m.real(key).ok();
    answers += m.boolean(key).ok();
    answers += m.string(key).ok();
    answers += m.integers(key, -1, INT64_MIN, INT64_MAX).ok();
    answers += m.integers(key, 3, 0, 1000).ok();
    answers += m.reals(key, -1).ok();
    answers += m.booleans(key, -1).ok();
    const auto strings = m.strings(key);
    if (strings.ok()) {
      for (const auto text : *strings) {
        for (const char c : text) answers += c == 'x';
      }
    }
  }
  for (const longkv::TensorInfo& t : file.tensors()) {
    const longkv::TensorTypeInfo* info = longkv::tensor_type_info(t.type);
    if (file.find(t.name) != &t || info == nullptr || t.bytes == 0) std::abort();
    // First and last block, decoded: extents that lie would be read out of bounds here.
    std::vector<float> out(size_t(info->block_values));
    longkv::dequantize(t.type, t.data, out.data(), info->block_values);
    longkv::dequantize(t.type, t.data + t.bytes - uint64_t(info->block_bytes), out.data(), info->block_values);
    answers += out[0] == 0.0f;
  }
  if (answers == SIZE_MAX) std::abort();  // keeps the reads above from being optimised away
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int fd = ::memfd_create("gguf_fuzz", 0);
  if (fd < 0 || ::ftruncate(fd, off_t(size)) != 0 || ::pwrite(fd, data, size, 0) != ssize_t(size)) return 0;
  const auto file = longkv::GgufFile::open("/proc/self/fd/" + std::to_string(fd));
  if (file.ok()) read_everything(*file);
  return 0;
}
