#include "kv/mask/identity.h"

#include <fmt/format.h>

namespace longkv {

std::string identity_difference(const std::string& learned, const std::string& model) {
  if (learned.empty() || model.empty() || learned == model) return "";
  const auto name = [](const std::string& identity) { return identity.substr(0, identity.rfind("; ")); };
  // Older files, and tests, know the name alone.
  const bool whole = learned.rfind("; ") != std::string::npos && model.rfind("; ") != std::string::npos;
  if (!whole && name(learned) == name(model)) return "";
  return fmt::format("was learned for '{}', this model is '{}'", whole ? learned : name(learned),
                     whole ? model : name(model));
}

}  // namespace longkv
