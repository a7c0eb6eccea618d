#include "kv/mask/torch_zip.h"

#include <charconv>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/float16.h"

namespace longkv {

namespace {

constexpr uint32_t kLocalEntry = 0x04034b50, kCentralEntry = 0x02014b50, kEndOfDirectory = 0x06054b50;
constexpr size_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22;
constexpr size_t kMaxStorages = 4096;

using Bytes = std::span<const uint8_t>;

template <class T>
T read_at(Bytes file, size_t at) {
  T value;
  std::memcpy(&value, file.data() + at, sizeof(value));
  return value;
}

bool holds(Bytes file, size_t at, size_t bytes) { return at <= file.size() && bytes <= file.size() - at; }

// Entries by the part of their name after the archive's own folder.
Result<std::map<std::string, Bytes, std::less<>>> read_entries(Bytes file) {
  size_t end = file.size();
  for (size_t i = kEndBytes; i <= file.size() && i <= kEndBytes + 65535; ++i) {
    if (read_at<uint32_t>(file, file.size() - i) == kEndOfDirectory) {
      end = file.size() - i;
      break;
    }
  }
  if (!holds(file, end, kEndBytes)) return fail(Code::kCorrupt, "the zip archive has no directory; is it cut short?");
  const size_t count = read_at<uint16_t>(file, end + 10);
  size_t at = read_at<uint32_t>(file, end + 16);
  std::map<std::string, Bytes, std::less<>> entries;
  for (size_t i = 0; i < count; ++i) {
    if (!holds(file, at, kCentralBytes) || read_at<uint32_t>(file, at) != kCentralEntry) {
      return fail(Code::kCorrupt, "entry {} of {} in the zip directory is damaged", i, count);
    }
    const auto method = read_at<uint16_t>(file, at + 10);
    const size_t bytes = read_at<uint32_t>(file, at + 20);
    const size_t name_bytes = read_at<uint16_t>(file, at + 28);
    const size_t local = read_at<uint32_t>(file, at + 42);
    const size_t next =
        at + kCentralBytes + name_bytes + read_at<uint16_t>(file, at + 30) + read_at<uint16_t>(file, at + 32);
    if (!holds(file, at + kCentralBytes, name_bytes) || !holds(file, local, kLocalBytes) ||
        read_at<uint32_t>(file, local) != kLocalEntry) {
      return fail(Code::kCorrupt, "entry {} of {} in the zip directory points outside the file", i, count);
    }
    std::string name(reinterpret_cast<const char*>(file.data()) + at + kCentralBytes, name_bytes);
    const size_t slash = name.find('/');
    if (slash != std::string::npos) name.erase(0, slash + 1);
    const size_t data = local + kLocalBytes + read_at<uint16_t>(file, local + 26) + read_at<uint16_t>(file, local + 28);
    if (!holds(file, data, bytes)) return fail(Code::kCorrupt, "zip entry '{}' ends outside the file", name);
    if (method != 0) return fail(Code::kUnsupported, "zip entry '{}' is compressed; torch.save does not do that", name);
    entries.emplace(std::move(name), file.subspan(data, bytes));
    at = next;
  }
  return entries;
}

// Element types by the word that a pickle names them with.
enum class Element { kF32, kF64, kF16, kBf16 };
Result<Element> element_of(std::string_view pickle) {
  constexpr std::pair<std::string_view, Element> kWords[] = {{"BFloat16Storage", Element::kBf16},
                                                             {"HalfStorage", Element::kF16},
                                                             {"DoubleStorage", Element::kF64},
                                                             {"FloatStorage", Element::kF32}};
  for (const auto& [word, element] : kWords) {
    if (pickle.find(word) != std::string_view::npos) return element;
  }
  return fail(Code::kUnsupported, "the saved tensor is not of a floating-point type; save it with .float()");
}

void append_floats(Bytes data, Element element, std::vector<float>& out) {
  const size_t size = element == Element::kF64 ? 8 : element == Element::kF32 ? 4 : 2;
  for (size_t i = 0; i + size <= data.size(); i += size) {
    switch (element) {
      case Element::kF32: out.push_back(read_at<float>(data, i)); break;
      case Element::kF64: out.push_back(float(read_at<double>(data, i))); break;
      case Element::kF16: out.push_back(to_float(f16_t{read_at<uint16_t>(data, i)})); break;
      case Element::kBf16: out.push_back(to_float(bf16_t{read_at<uint16_t>(data, i)})); break;
    }
  }
}

}  // namespace

bool is_zip(std::span<const uint8_t> file) {
  return file.size() >= kLocalBytes && read_at<uint32_t>(file, 0) == kLocalEntry;
}

Result<std::vector<float>> read_torch_floats(std::span<const uint8_t> file) {
  if (file.size() < kEndBytes) return fail(Code::kCorrupt, "a file of {} bytes is no zip archive", file.size());
  LONGKV_ASSIGN(const auto entries, read_entries(file));
  const auto pickle = entries.find("data.pkl");
  if (pickle == entries.end()) return fail(Code::kCorrupt, "the zip archive has no data.pkl; torch.save writes one");
  const Bytes words = pickle->second;
  LONGKV_ASSIGN(const Element element, element_of({reinterpret_cast<const char*>(words.data()), words.size()}));
  std::vector<float> out;
  for (size_t i = 0; i < kMaxStorages; ++i) {
    const auto storage = entries.find("data/" + std::to_string(i));
    if (storage == entries.end()) break;
    append_floats(storage->second, element, out);
  }
  return out;
}

}  // namespace longkv
