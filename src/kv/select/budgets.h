// Budgets and lists of layers as recipes write them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kv/recipe.h"
#include "longkv/status.h"

namespace longkv {

// [layers][KV heads]; the last layer and the last head stand for all that follow. Empty: none given.
using BudgetLists = std::vector<std::vector<int64_t>>;

// "2048,1024/512": layers between commas, the KV heads of a layer between slashes; sizes may have K, M, G. Errors:
// kInvalidArgument.
Result<BudgetLists> parse_budgets(std::string_view text);
// "0,16,32", ascending or not. Errors: kInvalidArgument.
Result<std::vector<int64_t>> parse_layers(std::string_view text);

// Rows that a KV head of a layer may attend when `rows` are visible.
class Budgets {
 public:
  // The specification has passed validate_recipe.
  explicit Budgets(const SelectSpec& select);
  int64_t of(int layer, int kv_head, int64_t rows) const;
  // Largest of a layer's heads.
  int64_t most(int layer, int kv_heads, int64_t rows) const;

 private:
  int64_t budget_;
  double share_;
  BudgetLists lists_;
};

}  // namespace longkv
