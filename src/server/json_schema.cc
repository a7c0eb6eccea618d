// JSON Schema to nodes.
#include <algorithm>
#include <cmath>
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
  const int64_t number = at->is_number() ? whole_number(*at).value_or(-1) : -1;
  if (number < 0 || number > (int64_t(1) << 40))
    return fail(Code::kInvalidArgument, "schema {}: '{}' must be a whole number of 0 or more", path, name);
  value = number;
  return {};
}

// Whole numbers are whole numbers however the schema wrote them. Values nest no deeper than the body that they came in.
json with_whole_numbers(json value) {
  if (value.is_structured()) {
    for (json& part : value) part = with_whole_numbers(std::move(part));
  } else if (value.is_number_float() && std::abs(value.get<double>()) < 0x1p53) {
    if (const auto whole = whole_number(value)) return *whole;
  }
  return value;
}

// A value of an enum as an answer writes it.
std::string literal_text(const json& value) { return with_whole_numbers(value).dump(); }

uint8_t types_a_value_has(const json& value) {
  switch (value.type()) {
    case json::value_t::object: return JsonSchema::kObject;
    case json::value_t::array: return JsonSchema::kArray;
    case json::value_t::string: return JsonSchema::kString;
    case json::value_t::boolean: return JsonSchema::kBoolean;
    case json::value_t::null: return JsonSchema::kNull;
    default: return whole_number(value) ? JsonSchema::kNumber | JsonSchema::kInteger : JsonSchema::kNumber;
  }
}

}  // namespace

std::shared_ptr<const JsonSchema> JsonSchema::any_object() {
  std::shared_ptr<JsonSchema> schema(new JsonSchema());
  schema->nodes_.emplace_back().types = kObject;
  schema->root_ = 1;
  return schema;
}

Result<std::shared_ptr<const JsonSchema>> JsonSchema::compile(const json& text) {
  if (!text.is_object()) return fail(Code::kInvalidArgument, "schema $: an object was expected");
  std::shared_ptr<JsonSchema> schema(new JsonSchema());
  LONGKV_ASSIGN(schema->root_, schema->add(text, "$", 1));
  if (schema->never(schema->root_)) return fail(Code::kCorrupt, "the schema contradicts itself: no value satisfies it");
  return std::shared_ptr<const JsonSchema>(schema);
}

Result<std::shared_ptr<const JsonSchema>> JsonSchema::call_of(const std::vector<Function>& functions,
                                                              const std::string& arguments) {
  if (functions.empty() || functions.size() > kMaxProperties) {
    return fail(Code::kInvalidArgument, "a call can be demanded of 1 to {} functions; found {}", kMaxProperties,
                functions.size());
  }
  std::shared_ptr<JsonSchema> schema(new JsonSchema());
  Node root;
  root.call = true;
  for (const Function& f : functions) {
    const std::string path = "of the parameters of '" + f.name.substr(0, 64) + "'";
    if (utf8_characters(f.name) > kMaxLiteral)
      return fail(Code::kInvalidArgument, "schema {}: a name of more than {} characters", path, kMaxLiteral);
    const json none = {{"type", "object"}, {"additionalProperties", false}};
    LONGKV_ASSIGN(const int id, schema->add(f.parameters ? *f.parameters : none, path, 1));
    // `true`, for one, is the node that allows anything.
    Node members = schema->node(id);
    members.types &= kObject;
    const bool listed = !members.literals.empty();
    std::erase_if(members.literals, [](const auto& text) { return text[0] != '{'; });
    if (listed ? members.literals.empty() : members.types == 0)
      return fail(Code::kCorrupt, "schema {}: no object satisfies it, and arguments are one", path);
    root.names.push_back("{\"name\": " + json(f.name).dump() + ", " + json(arguments).dump() + ": ");
    root.children.push_back(int(schema->nodes_.size()));
    schema->nodes_.push_back(std::move(members));
  }
  schema->root_ = int(schema->nodes_.size());
  schema->nodes_.push_back(std::move(root));
  return std::shared_ptr<const JsonSchema>(schema);
}

bool JsonSchema::allows(const json& value, int id) const {
  const Node& n = node(id);
  if (!n.literals.empty())
    return std::find(n.literals.begin(), n.literals.end(), literal_text(value)) != n.literals.end();
  if ((n.types & types_a_value_has(value)) == 0) return false;
  const auto within = [](size_t count, int64_t least, int64_t most) {
    return int64_t(count) >= least && (most < 0 || int64_t(count) <= most);
  };
  if (value.is_string())
    return within(utf8_characters(value.get_ref<const std::string&>()), n.min_length, n.max_length);
  if (value.is_array()) {
    return within(value.size(), n.min_items, n.max_items) &&
           std::all_of(value.begin(), value.end(), [&](const json& item) { return allows(item, n.items); });
  }
  if (!value.is_object()) return true;
  uint64_t seen = 0;
  for (const auto& [name, member] : value.items()) {
    const auto at = std::find(n.names.begin(), n.names.end(), json(name).dump());
    const uint64_t bit = at == n.names.end() ? 0 : uint64_t(1) << (at - n.names.begin());
    const int child = bit != 0 ? n.children[size_t(at - n.names.begin())] : n.additional;
    if ((bit & n.forbidden) != 0 || child < 0 || !allows(member, child)) return false;
    seen |= bit;
  }
  return (n.required & ~seen) == 0;
}

Result<int> JsonSchema::add(const json& schema, const std::string& path, int depth) {
  if (schema.is_boolean() && schema.get<bool>()) return 0;
  if (!schema.is_object() && !schema.is_boolean())
    return fail(Code::kInvalidArgument, "schema {}: an object was expected", path);
  if (depth > kMaxDepth) return fail(Code::kInvalidArgument, "schema {}: nested deeper than {}", path, kMaxDepth);
  if (nodes_.size() >= kMaxNodes) return fail(Code::kInvalidArgument, "the schema has more than {} parts", kMaxNodes);
  const int id = int(nodes_.size());
  nodes_.emplace_back();
  if (schema.is_boolean()) {
    nodes_[size_t(id)].types = 0;
    return id;
  }
  for (const auto& [word, value] : schema.items()) {
    if (contains(kAnnotations, word) || contains(kKnown, word)) continue;
    return fail(Code::kInvalidArgument,
                "schema {}: '{}' is not supported; supported are type, properties, required, additionalProperties, "
                "items, minItems, maxItems, minLength, maxLength, enum, const",
                path, word.substr(0, 64));
  }
  Node node;
  if (const auto type = schema.find("type"); type != schema.end()) {
    LONGKV_ASSIGN(node.types, types_of(*type, path));
  } else if (schema.contains("properties")) {
    node.types = kObject;
  } else if (schema.contains("items")) {
    node.types = kArray;
  }
  LONGKV_TRY(read_count(schema, "minItems", path, node.min_items));
  LONGKV_TRY(read_count(schema, "maxItems", path, node.max_items));
  LONGKV_TRY(read_count(schema, "minLength", path, node.min_length));
  LONGKV_TRY(read_count(schema, "maxLength", path, node.max_length));
  if (const auto items = schema.find("items"); items != schema.end()) {
    LONGKV_ASSIGN(node.items, add(*items, path + ".items", depth + 1));
    if (never(node.items)) node.max_items = 0;
  }
  LONGKV_TRY(add_members(schema, path, depth, node));
  const auto without = [&](Type type) { node.types &= uint8_t(~type); };
  if (node.max_items >= 0 && node.min_items > node.max_items) without(kArray);
  if (node.max_length >= 0 && node.min_length > node.max_length) without(kString);
  if ((node.required & node.forbidden) != 0) without(kObject);
  nodes_[size_t(id)] = std::move(node);
  LONGKV_TRY(add_literals(schema, path, id));
  return id;
}

// properties, additionalProperties, required
Status JsonSchema::add_members(const json& schema, const std::string& path, int depth, Node& node) {
  const auto add_name = [&](std::string name, int child) {
    if (child < 0 || never(child)) node.forbidden |= uint64_t(1) << node.names.size();
    node.names.push_back(std::move(name));
    node.children.push_back(std::max(child, 0));
  };
  if (const auto properties = schema.find("properties"); properties != schema.end()) {
    if (!properties->is_object() || properties->size() > kMaxProperties)
      return fail(Code::kInvalidArgument, "schema {}: 'properties' must be an object of at most {} members", path,
                  kMaxProperties);
    for (const auto& [name, value] : properties->items()) {
      LONGKV_ASSIGN(const int child, add(value, path + "." + name.substr(0, 64), depth + 1));
      add_name(json(name).dump(), child);
    }
    node.additional = -1;  // unless asked for: an answer has the named members only
  }
  const auto more = schema.find("additionalProperties");
  if (more != schema.end()) {
    LONGKV_ASSIGN(node.additional, add(*more, path + ".additionalProperties", depth + 1));
    if (never(node.additional)) node.additional = -1;
  }
  const auto required = schema.find("required");
  if (required == schema.end()) return {};
  if (!required->is_array()) return fail(Code::kInvalidArgument, "schema {}: 'required' must be a list", path);
  for (const json& name : *required) {
    if (!name.is_string()) return fail(Code::kInvalidArgument, "schema {}: 'required' must be a list of names", path);
    const std::string text = name.dump();
    size_t at = size_t(std::find(node.names.begin(), node.names.end(), text) - node.names.begin());
    if (at == node.names.size()) {
      if (at == kMaxProperties)
        return fail(Code::kInvalidArgument, "schema {}: more than {} names of members", path, kMaxProperties);
      // What only 'required' names is what further members are.
      add_name(text, more != schema.end() ? node.additional : 0);
    }
    node.required |= uint64_t(1) << at;
  }
  return {};
}

// enum and const: what of them the other words allow.
Status JsonSchema::add_literals(const json& schema, const std::string& path, int id) {
  const auto only = schema.find("const"), values = schema.find("enum");
  if (only == schema.end() && values == schema.end()) return {};
  if (values != schema.end() && (!values->is_array() || values->empty() || values->size() > kMaxProperties))
    return fail(Code::kInvalidArgument, "schema {}: 'enum' must be a list of 1 to {} values", path, kMaxProperties);
  std::vector<std::string> literals;
  const json list = values != schema.end() ? *values : json::array({*only});
  for (const json& value : list) {
    std::string literal = literal_text(value);
    const size_t length = utf8_characters(value.is_string() ? value.get_ref<const std::string&>() : literal);
    if (length > kMaxLiteral)
      return fail(Code::kInvalidArgument, "schema {}: a value of more than {} characters", path, kMaxLiteral);
    const bool meant = only == schema.end() || literal == literal_text(*only);
    if (meant && allows(value, id) && std::find(literals.begin(), literals.end(), literal) == literals.end())
      literals.push_back(std::move(literal));
  }
  Node& node = nodes_[size_t(id)];
  if (literals.empty()) node.types = 0;
  node.literals = std::move(literals);
  return {};
}

}  // namespace longkv::server
