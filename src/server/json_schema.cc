// JSON Schema to nodes.
#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "server/fields.h"
#include "server/json_grammar.h"

namespace longkv::server {

namespace {

using nlohmann::json;

constexpr size_t kMaxLiteral = 1024;  // characters

constexpr std::pair<const char*, JsonSchema::Type> kTypes[] = {
    {"object", JsonSchema::kObject}, {"array", JsonSchema::kArray},     {"string", JsonSchema::kString},
    {"number", JsonSchema::kNumber}, {"integer", JsonSchema::kInteger}, {"boolean", JsonSchema::kBoolean},
    {"null", JsonSchema::kNull}};

// Words that describe and do not constrain.
constexpr const char* kAnnotations[] = {"title",    "description", "default",  "examples",  "$schema", "$id",
                                        "$comment", "deprecated",  "readOnly", "writeOnly", "format",  "strict"};
constexpr const char* kKnown[] = {"type",      "properties", "required", "additionalProperties",
                                  "items",     "minItems",   "maxItems", "minLength",
                                  "maxLength", "enum",       "const"};

template <class Names>
bool contains(const Names& names, const std::string& name) {
  return std::any_of(std::begin(names), std::end(names), [&](const char* n) { return name == n; });
}

Result<uint8_t> types_of(const json& value, const std::string& path) {
  uint8_t types = 0;
  const auto add = [&](const json& name) -> Status {
    if (!name.is_string()) return fail(Code::kInvalidArgument, "schema {}: 'type' must be a name or a list", path);
    for (const auto& [text, type] : kTypes) {
      if (name == text) {
        types |= type;
        return {};
      }
    }
    return fail(Code::kInvalidArgument,
                "schema {}: type '{}' is not known; known are object, array, string, number, integer, boolean, null",
                path, name.get<std::string>().substr(0, 64));
  };
  if (!value.is_array()) {
    LONGKV_TRY(add(value));
    return types;
  }
  for (const json& name : value) LONGKV_TRY(add(name));
  if (types == 0 || value.size() > std::size(kTypes))
    return fail(Code::kInvalidArgument, "schema {}: 'type' must be a name or a list of 1 to {}", path,
                std::size(kTypes));
  return types;
}

// A non-negative whole number of the schema.
Status read_count(const json& schema, const char* name, const std::string& path, int64_t& value) {
  const auto at = schema.find(name);
  if (at == schema.end()) return {};
  if (!at->is_number_integer() || *at < 0 || *at > (int64_t(1) << 40))
    return fail(Code::kInvalidArgument, "schema {}: '{}' must be a whole number of 0 or more", path, name);
  value = at->get<int64_t>();
  return {};
}

}  // namespace

std::shared_ptr<const JsonSchema> JsonSchema::any_object() {
  std::shared_ptr<JsonSchema> schema(new JsonSchema());
  schema->nodes_.emplace_back().types = kObject;
  schema->root_ = 1;
  return schema;
}

Result<std::shared_ptr<const JsonSchema>> JsonSchema::compile(const json& text) {
  std::shared_ptr<JsonSchema> schema(new JsonSchema());
  LONGKV_ASSIGN(schema->root_, schema->add(text, "$", 1));
  return std::shared_ptr<const JsonSchema>(schema);
}

Result<int> JsonSchema::add(const json& schema, const std::string& path, int depth) {
  if (schema.is_boolean() && schema.get<bool>()) return 0;
  if (!schema.is_object()) return fail(Code::kInvalidArgument, "schema {}: an object was expected", path);
  if (depth > kMaxDepth) return fail(Code::kInvalidArgument, "schema {}: nested deeper than {}", path, kMaxDepth);
  if (nodes_.size() >= kMaxNodes) return fail(Code::kInvalidArgument, "the schema has more than {} parts", kMaxNodes);
  for (const auto& [word, value] : schema.items()) {
    if (contains(kAnnotations, word) || contains(kKnown, word)) continue;
    return fail(Code::kInvalidArgument,
                "schema {}: '{}' is not supported; supported are type, properties, required, additionalProperties, "
                "items, minItems, maxItems, minLength, maxLength, enum, const",
                path, word.substr(0, 64));
  }
  const int id = int(nodes_.size());
  nodes_.emplace_back();
  Node node;
  if (const auto type = schema.find("type"); type != schema.end()) {
    LONGKV_ASSIGN(node.types, types_of(*type, path));
  } else if (schema.contains("properties")) {
    node.types = kObject;
  } else if (schema.contains("items")) {
    node.types = kArray;
  }
  const auto add_literal = [&](const json& value) -> Status {
    std::string literal = value.dump();
    const size_t length =
        value.is_string() ? utf8_characters(value.get_ref<const std::string&>()) : utf8_characters(literal);
    if (length > kMaxLiteral)
      return fail(Code::kInvalidArgument, "schema {}: a value of more than {} characters", path, kMaxLiteral);
    if (std::find(node.literals.begin(), node.literals.end(), literal) == node.literals.end())
      node.literals.push_back(std::move(literal));
    return {};
  };
  if (const auto value = schema.find("const"); value != schema.end()) LONGKV_TRY(add_literal(*value));
  if (const auto values = schema.find("enum"); values != schema.end()) {
    if (!values->is_array() || values->empty() || values->size() > kMaxProperties)
      return fail(Code::kInvalidArgument, "schema {}: 'enum' must be a list of 1 to {} values", path, kMaxProperties);
    for (const json& value : *values) LONGKV_TRY(add_literal(value));
  }
  LONGKV_TRY(read_count(schema, "minItems", path, node.min_items));
  LONGKV_TRY(read_count(schema, "maxItems", path, node.max_items));
  LONGKV_TRY(read_count(schema, "minLength", path, node.min_length));
  LONGKV_TRY(read_count(schema, "maxLength", path, node.max_length));
  // Bounds of a type that the schema does not have bind nothing.
  if ((node.types & kArray) != 0 && node.max_items >= 0 && node.min_items > node.max_items)
    return fail(Code::kInvalidArgument, "schema {}: minItems is above maxItems", path);
  if ((node.types & kString) != 0 && node.max_length >= 0 && node.min_length > node.max_length)
    return fail(Code::kInvalidArgument, "schema {}: minLength is above maxLength", path);
  if (const auto items = schema.find("items"); items != schema.end()) {
    LONGKV_ASSIGN(node.items, add(*items, path + ".items", depth + 1));
  }
  if (const auto properties = schema.find("properties"); properties != schema.end()) {
    if (!properties->is_object() || properties->size() > kMaxProperties)
      return fail(Code::kInvalidArgument, "schema {}: 'properties' must be an object of at most {} members", path,
                  kMaxProperties);
    for (const auto& [name, value] : properties->items()) {
      LONGKV_ASSIGN(const int child, add(value, path + "." + name.substr(0, 64), depth + 1));
      node.names.push_back(json(name).dump());
      node.children.push_back(child);
    }
    node.additional = -1;  // unless asked for: an answer has the named members only
  }
  if (const auto more = schema.find("additionalProperties"); more != schema.end()) {
    node.additional = -1;
    if (!more->is_boolean() || more->get<bool>()) {
      LONGKV_ASSIGN(node.additional, add(*more, path + ".additionalProperties", depth + 1));
    }
  }
  if (const auto required = schema.find("required"); required != schema.end()) {
    if (!required->is_array()) return fail(Code::kInvalidArgument, "schema {}: 'required' must be a list", path);
    for (const json& name : *required) {
      const std::string text = name.is_string() ? name.dump() : "";
      if (text.empty()) return fail(Code::kInvalidArgument, "schema {}: 'required' must be a list of names", path);
      auto at = std::find(node.names.begin(), node.names.end(), text);
      if (at == node.names.end()) {
        // What only 'required' names is what further members are.
        const int child = schema.contains("additionalProperties") ? node.additional : 0;
        if (child < 0 || node.names.size() == kMaxProperties) {
          return fail(Code::kInvalidArgument,
                      "schema {}: 'required' names {}, which 'additionalProperties' forbids or which is one too many",
                      path, text.substr(0, 64));
        }
        node.names.push_back(text);
        node.children.push_back(child);
        at = node.names.end() - 1;
      }
      node.required |= uint64_t(1) << (at - node.names.begin());
    }
  }
  nodes_[size_t(id)] = std::move(node);
  return id;
}

}  // namespace longkv::server
