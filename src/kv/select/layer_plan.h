// What each layer does in a decode step under a recipe: attend everything, choose, or reuse a choice.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/recipe.h"
#include "kv/types.h"

namespace longkv {

enum class LayerRole {
  kDense,   // every visible row; has no index and no list
  kChoose,  // owns an index and a list of chosen blocks
  kReuse,   // attends what its source layer chose
};

struct LayerPlan {
  LayerRole role = LayerRole::kDense;
  int source = -1;     // kChoose: itself; kReuse: the choosing layer; else -1
  int64_t window = 0;  // rows a query sees, its own included; 0 = all
};

// Layers below `dense_layers` and sliding-window layers whose window fits in the budget are dense and never share a
// list. Among the other layers every layer_step-th chooses; layers of different windows are counted apart, so that a
// list is only reused where the same rows are visible. layer_step need not divide anything.
std::vector<LayerPlan> plan_layers(const KvShape& shape, const Recipe& recipe);

}  // namespace longkv
