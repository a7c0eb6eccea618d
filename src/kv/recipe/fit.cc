#include "kv/recipe/fit.h"

#include <fmt/format.h>

#include <algorithm>

#include "kv/select/budgets.h"

namespace longkv {

std::vector<std::string> recipe_misfits(const Recipe& recipe, const KvShape& shape) {
  std::vector<std::string> out;
  const SelectSpec& select = recipe.select;
  // The recipe has been validated, so its lists can be read.
  if (const auto lists = parse_budgets(select.budgets); lists.ok() && !lists->empty()) {
    if (int64_t(lists->size()) > shape.layers) {
      out.push_back(fmt::format("budgets has {} layers of a model of {}: the last {} have no effect", lists->size(),
                                shape.layers, int64_t(lists->size()) - shape.layers));
    }
    size_t heads = 0;
    for (const auto& layer : *lists) heads = std::max(heads, layer.size());
    if (int64_t(heads) > shape.kv_heads) {
      out.push_back(fmt::format("budgets has {} KV heads in a layer of {}: the last {} have no effect", heads,
                                shape.kv_heads, int64_t(heads) - shape.kv_heads));
    }
  }
  if (const auto dense = parse_layers(select.dense); dense.ok() && !dense->empty()) {
    const int64_t last = *std::max_element(dense->begin(), dense->end());
    if (last >= shape.layers) {
      out.push_back(
          fmt::format("dense names layer {} of a model whose last is {}: it has no effect", last, shape.layers - 1));
    }
  }
  const IndexKind kind = recipe.index.kind;
  if ((kind == IndexKind::kChannels || kind == IndexKind::kLabels) && recipe.index.channels > shape.dim_k) {
    out.push_back(
        fmt::format("channels={} of keys of {} channels: all of them are used", recipe.index.channels, shape.dim_k));
  }
  return out;
}

}  // namespace longkv
