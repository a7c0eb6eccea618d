// A small YAML document as a flat list of nodes: maps, sequences and scalars with their lines. Tags, anchors and
// aliases, which settings files do not need, are refused; so are more than kMaxYamlDepth levels.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "longkv/status.h"

namespace longkv {

constexpr size_t kMaxYamlBytes = 64 * 1024;
constexpr size_t kMaxYamlNodes = 4096;
constexpr int kMaxYamlDepth = 8;

struct YamlNode {
  enum class Kind { kNull, kScalar, kMap, kSequence };
  Kind kind = Kind::kNull;
  std::string text;   // of scalars
  std::string where;  // "line 3, column 9"
  // Nodes of this one in YamlDocument::nodes: for maps key, value, key, value, ...
  std::vector<size_t> children;
};

struct YamlDocument {
  std::vector<YamlNode> nodes;  // nodes[0] is the root
  const YamlNode& root() const { return nodes[0]; }
};

// Errors: kInvalidArgument with line and column. Keys are scalars and given once in each map.
Result<YamlDocument> read_yaml(std::string_view text);

// A whole settings file. Errors: kIo, kInvalidArgument (larger than kMaxYamlBytes).
Result<std::string> read_settings_file(const std::string& path);

}  // namespace longkv
