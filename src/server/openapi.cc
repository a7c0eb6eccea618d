#include "server/openapi.h"

#include <yaml-cpp/yaml.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "server/ui.h"

namespace longkv::server {

namespace {

using Json = nlohmann::ordered_json;

// Plain scalars of the file are numbers, true, false or text; quoted ones are text.
Json scalar(const YAML::Node& node) {
  const std::string& text = node.Scalar();
  if (node.Tag() == "!") return text;
  if (text == "true" || text == "false") return text == "true";
  char* end = nullptr;
  const long long whole = std::strtoll(text.c_str(), &end, 10);
  if (!text.empty() && *end == '\0') return whole;
  const double number = std::strtod(text.c_str(), &end);
  if (!text.empty() && *end == '\0' && text.find_first_not_of("0123456789.-") == std::string::npos) return number;
  return text;
}

// The file is ours and nests a dozen levels.
Json convert(const YAML::Node& node) {
  if (node.IsMap()) {
    Json j = Json::object();
    for (const auto& pair : node) j[pair.first.Scalar()] = convert(pair.second);
    return j;
  }
  if (node.IsSequence()) {
    Json j = Json::array();
    for (const auto& item : node) j.push_back(convert(item));
    return j;
  }
  return node.IsScalar() ? scalar(node) : Json();
}

}  // namespace

std::string openapi_json(const Service& service) {
  Json api = Json::object();
  for (const UiFile& file : ui_files()) {
    if (file.path == std::string_view("/openapi.yaml")) api = convert(YAML::Load(std::string(file.data, file.size)));
  }
  Json& schemas = api["components"]["schemas"];
  schemas["TokenId"]["maximum"] = service.model().config().vocab - 1;
  for (const char* slot : {"SlotId", "WantedSlot"}) {
    schemas[slot]["maximum"] = service.options().scheduler.slots - 1;
  }
  Json recipes = service.recipe_names();
  recipes.push_back(nullptr);
  schemas["Recipe"]["enum"] = std::move(recipes);
  if (!service.takes_tools()) {
    schemas["Tools"]["maxItems"] = 0;
    schemas["Message"]["anyOf"].erase(1);  // calls alone
    schemas["ToolChoice"] = {{"enum", {"auto", "none", nullptr}}};
  }
  return api.dump();
}

}  // namespace longkv::server
