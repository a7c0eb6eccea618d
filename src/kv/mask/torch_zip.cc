#include "kv/mask/torch_zip.h"

#include <zlib.h>

#include <charconv>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>

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

namespace {

template <class T>
requires std::is_arithmetic_v<T>
void put(std::vector<uint8_t>& out, T value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof(value));
}

void put(std::vector<uint8_t>& out, std::string_view text) { out.insert(out.end(), text.begin(), text.end()); }

// Opcodes of pickle's protocol 2: a call of _rebuild_tensor_v2 with a storage, offset, sizes and strides.
std::vector<uint8_t> pickle_of(int64_t values, const int64_t (&dims)[3]) {
  std::vector<uint8_t> p;
  const auto number = [&](int64_t n) {
    p.push_back('J');  // BININT
    put(p, int32_t(n));
  };
  const auto word = [&](std::string_view text) {
    p.push_back('X');  // BINUNICODE
    put(p, uint32_t(text.size()));
    put(p, text);
  };
  put(p,
      "\x80\x02"
      "ctorch._utils\n_rebuild_tensor_v2\n((");
  word("storage");
  put(p, "ctorch\nFloatStorage\n");
  word("0");
  word("cpu");
  number(values);
  put(p, "tQ");
  number(0);
  for (int64_t d : dims) number(d);
  p.push_back(0x87);  // TUPLE3
  number(dims[1] * dims[2]);
  number(dims[2]);
  number(1);
  p.push_back(0x87);
  p.push_back(0x89);  // NEWFALSE: needs no gradient
  put(p, "ccollections\nOrderedDict\n)RtR.");
  return p;
}

}  // namespace

std::vector<uint8_t> write_torch_floats(std::span<const float> values, const int64_t (&dims)[3]) {
  const std::vector<uint8_t> pickle = pickle_of(int64_t(values.size()), dims);
  const std::string_view version = "3\n", order = "little";
  const auto text = [](std::string_view s) { return Bytes(reinterpret_cast<const uint8_t*>(s.data()), s.size()); };
  const std::pair<std::string_view, Bytes> entries[] = {
      {"mask/data.pkl", pickle},
      {"mask/byteorder", text(order)},
      {"mask/data/0", {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)}},
      {"mask/version", text(version)}};
  constexpr size_t kAlign = 64;  // of a storage, as torch maps it
  std::vector<uint8_t> out, directory;
  for (const auto& [name, data] : entries) {
    const auto at = uint32_t(out.size());
    const size_t padding = (kAlign - (out.size() + kLocalBytes + name.size()) % kAlign) % kAlign;
    const auto head = [&, &name = name, &data = data](std::vector<uint8_t>& to, uint16_t extra) {
      put(to, uint16_t(0));           // flags
      put(to, uint16_t(0));           // stored
      put(to, uint32_t(0x00210000));  // 1 January 1980
      put(to, uint32_t(::crc32(0, data.data(), uInt(data.size()))));
      put(to, uint32_t(data.size()));
      put(to, uint32_t(data.size()));
      put(to, uint16_t(name.size()));
      put(to, extra);
    };
    put(out, kLocalEntry);
    put(out, uint16_t(20));
    // An extra field has four bytes of its own, so a smaller gap takes a whole unit more.
    const size_t extra = padding == 0 ? 0 : padding < 4 ? padding + kAlign : padding;
    head(out, uint16_t(extra));
    put(out, name);
    if (extra > 0) {
      put(out, uint16_t(0x4246));
      put(out, uint16_t(extra - 4));
      out.resize(out.size() + extra - 4, 0);
    }
    out.insert(out.end(), data.begin(), data.end());
    put(directory, kCentralEntry);
    put(directory, uint16_t(20));
    put(directory, uint16_t(20));
    head(directory, 0);
    directory.resize(directory.size() + 10, 0);  // comment, disk, attributes
    put(directory, at);
    put(directory, name);
  }
  const auto begin = uint32_t(out.size());
  out.insert(out.end(), directory.begin(), directory.end());
  put(out, kEndOfDirectory);
  put(out, uint32_t(0));
  put(out, uint16_t(std::size(entries)));
  put(out, uint16_t(std::size(entries)));
  put(out, uint32_t(directory.size()));
  put(out, begin);
  put(out, uint16_t(0));
  return out;
}

}  // namespace longkv
