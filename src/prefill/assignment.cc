#include "prefill/assignment.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/log.h"
#include "base/mapped_file.h"

namespace longkv {

namespace {

constexpr size_t kMaxFile = size_t{16} << 20;
constexpr int64_t kMaxSize = int64_t{1} << 40;
// What MInference's code does with heads that its file lacks.
constexpr HeadPattern kMissing{PrefillKind::kVerticalSlash, 1000, 6096};

struct Name {
  const char* text;
  PrefillKind kind;
};
constexpr Name kNames[] = {
    {"vertical_and_slash", PrefillKind::kVerticalSlash},
    {"stream_llm", PrefillKind::kAShape},
    {"a_shape", PrefillKind::kAShape},
    {"block_sparse", PrefillKind::kBlockSparse},
    {"dense", PrefillKind::kDense},
};

// A size of an entry: a whole number, which published files also write as a float.
Result<int64_t> read_size(const nlohmann::json& entry, size_t at, int layer, int head) {
  const nlohmann::json& value = entry[at];
  double number = -1;
  if (value.is_number()) number = value.get<double>();
  if (!(number >= 0 && number <= double(kMaxSize)) || number != double(int64_t(number))) {
    return fail(Code::kCorrupt, "assignment: layer {}, head {}: size {} is {}; expected a whole number from 0", layer,
                head, at, value.dump());
  }
  return int64_t(number);
}

// `unknown` collects names that mean nothing here.
Result<HeadPattern> read_entry(const nlohmann::json& entry, int layer, int head, std::vector<std::string>& unknown) {
  if (!entry.is_array() || entry.size() < 3 || !entry[0].is_string()) {
    return fail(Code::kCorrupt, "assignment: layer {}, head {}: found {}; expected [pattern, size, size, score]", layer,
                head, entry.dump().substr(0, 80));
  }
  const auto& name = entry[0].get_ref<const std::string&>();
  HeadPattern pattern;
  LONGKV_ASSIGN(pattern.first, read_size(entry, 1, layer, head));
  LONGKV_ASSIGN(pattern.second, read_size(entry, 2, layer, head));
  const auto* known = std::find_if(std::begin(kNames), std::end(kNames), [&](const Name& n) { return name == n.text; });
  if (known == std::end(kNames)) {
    unknown.push_back(fmt::format("'{}' (layer {}, head {})", name.substr(0, 40), layer, head));
    return HeadPattern{};
  }
  pattern.kind = known->kind;
  if (pattern.kind == PrefillKind::kDense) return HeadPattern{};
  if (pattern.kind == PrefillKind::kBlockSparse) pattern.second = 0;  // without meaning there
  return pattern;
}

Result<std::vector<HeadPattern>> read_layer(const nlohmann::json& object, int layer, int heads, const PrefillSpec& spec,
                                            std::vector<std::string>& unknown) {
  if (!object.is_object()) {
    return fail(Code::kCorrupt, "assignment: layer {} is no object of heads but {}", layer,
                object.dump().substr(0, 80));
  }
  std::vector<HeadPattern> patterns(size_t(heads), kMissing);
  std::vector<bool> given(size_t(heads), false);
  for (const auto& [key, entry] : object.items()) {
    int head = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), head);
    if (error != std::errc{} || end != key.data() + key.size() || head < 0) {
      return fail(Code::kCorrupt, "assignment: layer {} has the key '{}'; expected the number of a query head", layer,
                  key.substr(0, 40));
    }
    if (head >= heads) {
      return fail(Code::kInvalidArgument,
                  "assignment: layer {} names query head {}, but the model has {}; the file is for another model",
                  layer, head, heads);
    }
    LONGKV_ASSIGN(patterns[size_t(head)], read_entry(entry, layer, head, unknown));
    given[size_t(head)] = true;
  }
  const auto missing = std::find(given.begin(), given.end(), false);
  if (missing != given.end() && spec.missing == MissingHeads::kError) {
    return fail(
        Code::kInvalidArgument,
        "assignment: layer {} names {} of the model's {} query heads, head {} is missing; complete the file, or "
        "let missing heads use MInference's fallback with missing=vertical_slash",
        layer, std::count(given.begin(), given.end(), true), heads, missing - given.begin());
  }
  return patterns;
}

}  // namespace

Result<PatternAssignment> parse_assignment(std::string_view json, int layers, int heads, const PrefillSpec& spec) {
  const nlohmann::json file = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (file.is_discarded()) return fail(Code::kCorrupt, "assignment: the file is not JSON");
  if (!file.is_array()) {
    return fail(Code::kCorrupt, "assignment: found {}; expected an array with one object per layer", file.type_name());
  }
  if (file.size() < size_t(layers) && spec.missing == MissingHeads::kError) {
    return fail(Code::kInvalidArgument,
                "assignment: the file has {} layers and the model {}; complete the file, or let missing layers use "
                "MInference's fallback with missing=vertical_slash",
                file.size(), layers);
  }
  PatternAssignment assignment(size_t(layers), std::vector<HeadPattern>(size_t(heads), kMissing));
  std::vector<std::string> unknown;
  for (size_t layer = 0; layer < file.size() && layer < size_t(layers); ++layer) {
    LONGKV_ASSIGN(assignment[layer], read_layer(file[layer], int(layer), heads, spec, unknown));
  }
  if (file.size() > size_t(layers)) {
    LONGKV_TRY(notice(fmt::format("assignment: the file has {} layers and the model {}; the others are left out",
                                  file.size(), layers)));
  }
  if (!unknown.empty()) {
    LONGKV_TRY(notice(fmt::format("assignment: {} heads with unknown patterns attend everything: {}{}", unknown.size(),
                                  unknown.front(), unknown.size() > 1 ? ", ..." : "")));
  }
  return assignment;
}

Result<PatternAssignment> load_assignment(const PrefillSpec& spec, int layers, int heads) {
  LONGKV_ASSIGN(const MappedFile file, MappedFile::open(spec.file));
  const auto bytes = file.bytes();
  if (bytes.size() > kMaxFile) {
    return fail(Code::kCorrupt, "{}: an assignment of {} bytes is too large; at most {}", spec.file, bytes.size(),
                kMaxFile);
  }
  auto parsed = parse_assignment({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, layers, heads, spec);
  if (!parsed.ok()) return Status(parsed.status().code(), spec.file + ": " + parsed.status().message());
  return parsed;
}

Result<PatternAssignment> assignment_of(const PrefillSpec& spec, int layers, int heads) {
  if (assigns_by_file(spec)) return load_assignment(spec, layers, heads);
  return uniform_assignment(spec, layers, heads);
}

std::string write_assignment(const PatternAssignment& assignment, const std::vector<std::vector<double>>& scores) {
  nlohmann::ordered_json file = nlohmann::ordered_json::array();
  for (size_t layer = 0; layer < assignment.size(); ++layer) {
    nlohmann::ordered_json object = nlohmann::ordered_json::object();
    for (size_t head = 0; head < assignment[layer].size(); ++head) {
      const HeadPattern& p = assignment[layer][head];
      const auto* name =
          std::find_if(std::begin(kNames), std::end(kNames), [&](const Name& n) { return n.kind == p.kind; });
      const double score = scores.empty() ? 0.0 : scores[layer][head];
      object[std::to_string(head)] = {name->text, p.first, p.second, score};
    }
    file.push_back(std::move(object));
  }
  return file.dump(1) + "\n";
}

}  // namespace longkv
