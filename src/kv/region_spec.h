// Which old rows a recipe encodes, and how.
#pragma once

#include <optional>
#include <string>

#include "kv/recipe.h"
#include "kv/region_store.h"
#include "longkv/status.h"

namespace longkv {

// What the store and mask stages ask for; empty when every row is held as it comes. model: identity of the one that the
// mask is used with. capped: attention caps its scores. Errors: a mask for another model, rotation or means that this
// one does not allow.
Result<std::optional<RegionSpec>> region_spec(const KvShape& shape, const Recipe& recipe, const std::string& model,
                                              bool capped);

}  // namespace longkv
