#include "chat/jinja/filters.h"

#include <unordered_map>

namespace longkv::jinja {

namespace {

const std::unordered_map<std::string_view, FilterFunction>& table() {
  static const auto* const filters = [] {
    auto* all = new std::unordered_map<std::string_view, FilterFunction>();
    for (const auto group : {text_filters(), sequence_filters(), value_filters()}) {
      for (const NamedFilter& f : group) all->emplace(f.name, f.function);
    }
    return all;
  }();
  return *filters;
}

}  // namespace

FilterFunction find_filter(std::string_view name) {
  const auto found = table().find(name);
  return found == table().end() ? nullptr : found->second;
}

bool known_filter(std::string_view name) { return find_filter(name) != nullptr; }

}  // namespace longkv::jinja
