#include "kv/select/layer_plan.h"

#include <algorithm>
#include <map>

#include "kv/select/budgets.h"

namespace longkv {

std::vector<LayerPlan> plan_layers(const KvShape& shape, const Recipe& recipe) {
  struct Counter {
    int64_t seen = 0;
    int source = -1;
  };
  std::map<int64_t, Counter> counters;  // by window
  std::vector<LayerPlan> plans(static_cast<size_t>(shape.layers));
  const SelectSpec& select = recipe.select;
  // Checked by validate_recipe.
  const Result<std::vector<int64_t>> listed_layers = parse_layers(select.dense);
  const std::vector<int64_t> dense = listed_layers.ok() ? listed_layers.value() : std::vector<int64_t>{};
  for (int l = 0; l < shape.layers; ++l) {
    LayerPlan& plan = plans[size_t(l)];
    plan.window = shape.window_of(l);
    const bool window_fits = plan.window > 0 && plan.window <= select.budget;
    // Sums over whole clusters and over all values know no window.
    const bool whole = recipe.index.kind == IndexKind::kClusters || recipe.tail.kind == TailKind::kMean;
    const bool listed = std::find(dense.begin(), dense.end(), int64_t(l)) != dense.end();
    if (select.all || l < select.dense_layers || listed || window_fits || (whole && plan.window > 0)) continue;
    Counter& counter = counters[plan.window];
    const bool choose = counter.seen % std::max(1, select.layer_step) == 0;
    if (choose) counter.source = l;
    plan.role = choose ? LayerRole::kChoose : LayerRole::kReuse;
    plan.source = counter.source;
    ++counter.seen;
  }
  return plans;
}

}  // namespace longkv
