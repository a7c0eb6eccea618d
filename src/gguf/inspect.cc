#include "gguf/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "gguf/cursor.h"
#include "gguf/format.h"
#include "gguf/printable.h"

namespace longkv {

namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kShownElements = 6;
constexpr size_t kShownText = 100;  // bytes of a single string
constexpr size_t kShownToken = 24;  // bytes of a string inside an array

template <class T>
T load(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

Json scalar(uint32_t type, const uint8_t* p) {
  switch (GgufType(type)) {
    case GgufType::kU8: return load<uint8_t>(p);
    case GgufType::kI8: return load<int8_t>(p);
    case GgufType::kU16: return load<uint16_t>(p);
    case GgufType::kI16: return load<int16_t>(p);
    case GgufType::kU32: return load<uint32_t>(p);
    case GgufType::kI32: return load<int32_t>(p);
    case GgufType::kF32: return load<float>(p);
    case GgufType::kBool: return *p != 0;
    case GgufType::kU64: return load<uint64_t>(p);
    case GgufType::kI64: return load<int64_t>(p);
    case GgufType::kF64: return load<double>(p);
    case GgufType::kString:
    case GgufType::kArray: break;
  }
  return nullptr;
}

// The first elements of an array; nothing for arrays of arrays, whose count says enough.
Json first_elements(const GgufValue& value) {
  Json out = Json::array();
  const uint64_t shown = std::min(value.count, kShownElements);
  if (value.element_type == uint32_t(GgufType::kString)) {
    Cursor cursor(value.bytes);
    for (uint64_t i = 0; i < shown; ++i) {
      const auto text = cursor.string(kGgufMaxString, "array string");
      if (!text.ok()) return out;
      out.push_back(std::string(*text));
    }
  } else if (const uint64_t width = gguf_scalar_bytes(value.element_type); width > 0) {
    for (uint64_t i = 0; i < shown; ++i) out.push_back(scalar(value.element_type, value.bytes.data() + i * width));
  }
  return out;
}

Json value_json(const GgufValue& value) {
  Json out;
  out["type"] = gguf_type_name(value.type);
  if (value.type == uint32_t(GgufType::kArray)) {
    out["element_type"] = gguf_type_name(value.element_type);
    out["count"] = value.count;
    out["first"] = first_elements(value);
  } else if (value.type == uint32_t(GgufType::kString)) {
    out["value"] = std::string(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
  } else {
    out["value"] = scalar(value.type, value.bytes.data());
  }
  return out;
}

// fp32 values in their own shortest form; through double they would print digits that are not in the file.
std::string number_text(uint32_t type, const uint8_t* p) {
  switch (GgufType(type)) {
    case GgufType::kF32: return fmt::format("{}", load<float>(p));
    case GgufType::kF64: return fmt::format("{}", load<double>(p));
    default: return scalar(type, p).dump();
  }
}

std::string value_text(const GgufValue& value) {
  if (value.type == uint32_t(GgufType::kString)) {
    const std::string_view text(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
    const std::string shown = fmt::format("\"{}\"", printable(text, kShownText));
    return text.size() > kShownText ? fmt::format("{} ({} bytes)", shown, text.size()) : shown;
  }
  if (value.type != uint32_t(GgufType::kArray)) return number_text(value.type, value.bytes.data());
  std::vector<std::string> parts;
  if (value.element_type == uint32_t(GgufType::kString)) {
    Cursor cursor(value.bytes);
    for (uint64_t i = 0; i < std::min(value.count, kShownElements); ++i) {
      const auto text = cursor.string(kGgufMaxString, "array string");
      if (!text.ok()) break;
      parts.push_back(fmt::format("\"{}\"", printable(*text, kShownToken)));
    }
  } else if (const uint64_t width = gguf_scalar_bytes(value.element_type); width > 0) {
    for (uint64_t i = 0; i < std::min(value.count, kShownElements); ++i) {
      parts.push_back(number_text(value.element_type, value.bytes.data() + i * width));
    }
  }
  if (parts.size() < value.count) parts.push_back("...");
  return fmt::format("[{}] ({} {})", fmt::join(parts, ", "), value.count, gguf_type_name(value.element_type));
}

std::string type_text(const GgufValue& value) {
  const char* name = gguf_type_name(value.type);
  return value.type == uint32_t(GgufType::kArray) ? fmt::format("{}[]", gguf_type_name(value.element_type)) : name;
}

struct Totals {
  int64_t tensors = 0;
  uint64_t parameters = 0;
  uint64_t bytes = 0;

  void add(const TensorInfo& t) {
    ++tensors;
    parameters += uint64_t(t.elements());
    bytes += t.bytes;
  }
  double bits_per_weight() const { return parameters > 0 ? 8.0 * double(bytes) / double(parameters) : 0.0; }
};

// Tensors do not overlap inside their files, so the sums stay below the size of the files in bits.
std::map<std::string, Totals> totals_by_type(const GgufFile& file, Totals& all) {
  std::map<std::string, Totals> by_type;
  for (const TensorInfo& t : file.tensors()) {
    all.add(t);
    by_type[tensor_type_info(t.type)->name].add(t);
  }
  return by_type;
}

std::vector<int64_t> dims_of(const TensorInfo& t) { return {t.dims.begin(), t.dims.begin() + t.n_dims}; }

std::string describe_json(const GgufFile& file) {
  Json out;
  out["path"] = file.path();
  out["version"] = file.version();
  out["file_bytes"] = file.file_bytes();
  out["metadata"] = Json::object();
  for (const auto& [key, value] : file.metadata().all()) out["metadata"][key] = value_json(value);
  out["tensors"] = Json::array();
  for (const TensorInfo& t : file.tensors()) {
    out["tensors"].push_back(
        {{"name", t.name}, {"type", tensor_type_info(t.type)->name}, {"dims", dims_of(t)}, {"bytes", t.bytes}});
  }
  Totals all;
  const auto by_type = totals_by_type(file, all);
  Json& totals = out["totals"];
  totals["tensors"] = all.tensors;
  totals["parameters"] = all.parameters;
  totals["bytes"] = all.bytes;
  totals["bits_per_weight"] = all.bits_per_weight();
  totals["by_type"] = Json::object();
  for (const auto& [name, t] : by_type) {
    totals["by_type"][name] = {{"tensors", t.tensors}, {"parameters", t.parameters}, {"bytes", t.bytes}};
  }
  return out.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string describe_text(const GgufFile& file) {
  fmt::memory_buffer buffer;
  auto out = std::back_inserter(buffer);
  fmt::format_to(out, "{}: GGUF version {}, {} bytes\n\nmetadata ({} pairs)\n", printable(file.path(), 4096),
                 file.version(), file.file_bytes(), file.metadata().all().size());
  size_t key_width = 0;
  for (const auto& [key, value] : file.metadata().all()) key_width = std::max(key_width, printable(key).size());
  for (const auto& [key, value] : file.metadata().all()) {
    fmt::format_to(out, "  {:<{}}  {:<8}  {}\n", printable(key), key_width, type_text(value), value_text(value));
  }
  size_t name_width = 0;
  for (const TensorInfo& t : file.tensors()) name_width = std::max(name_width, printable(t.name).size());
  fmt::format_to(out, "\ntensors ({})\n", file.tensors().size());
  for (const TensorInfo& t : file.tensors()) {
    fmt::format_to(out, "  {:<{}}  {:<7} {:>22} {:>14} bytes\n", printable(t.name), name_width,
                   tensor_type_info(t.type)->name, fmt::format("{}", fmt::join(dims_of(t), " x ")), t.bytes);
  }
  Totals all;
  const auto by_type = totals_by_type(file, all);
  const auto line = [&](const std::string& name, const Totals& t) {
    fmt::format_to(out, "  {:<7} {:>5} tensors {:>14} parameters {:>14} bytes {:>7.3f} bits per weight\n", name,
                   t.tensors, t.parameters, t.bytes, t.bits_per_weight());
  };
  fmt::format_to(out, "\ntotals\n");
  for (const auto& [name, t] : by_type) line(name, t);
  line("all", all);
  return fmt::to_string(buffer);
}

}  // namespace

std::string describe_gguf(const GgufFile& file, bool json) { return json ? describe_json(file) : describe_text(file); }

}  // namespace longkv
