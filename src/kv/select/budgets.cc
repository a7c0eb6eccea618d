#include "kv/select/budgets.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/trim.h"
#include "kv/recipe/words.h"

namespace longkv {

namespace {

constexpr int64_t kMaxBudget = int64_t{1} << 40;
constexpr int64_t kMaxLayer = 65536;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

}  // namespace

Result<BudgetLists> parse_budgets(std::string_view text) {
  BudgetLists lists;
  if (text.empty()) return lists;
  for (const std::string_view layer : split(text, ',')) {
    lists.emplace_back();
    for (const std::string_view head : split(layer, '/')) {
      const RecipeWord word{std::string(trim(head)), fmt::format("budgets, layer {}", lists.size() - 1)};
      LONGKV_ASSIGN(const int64_t budget, parse_size("budgets", word, 1, kMaxBudget));
      lists.back().push_back(budget);
    }
  }
  return lists;
}

Result<std::vector<int64_t>> parse_layers(std::string_view text) {
  std::vector<int64_t> layers;
  if (text.empty()) return layers;
  for (const std::string_view part : split(text, ',')) {
    const RecipeWord word{std::string(trim(part)), fmt::format("dense, entry {}", layers.size())};
    LONGKV_ASSIGN(const int64_t layer, parse_size("dense", word, 0, kMaxLayer));
    layers.push_back(layer);
  }
  return layers;
}

Budgets::Budgets(const SelectSpec& select) : budget_(select.budget), share_(select.share) {
  if (Result<BudgetLists> lists = parse_budgets(select.budgets); lists.ok()) lists_ = std::move(lists).value();
}

int64_t Budgets::of(int layer, int kv_head, int64_t rows) const {
  int64_t budget = budget_;
  if (!lists_.empty()) {
    const std::vector<int64_t>& heads = lists_[std::min(size_t(layer), lists_.size() - 1)];
    budget = heads[std::min(size_t(kv_head), heads.size() - 1)];
  }
  return std::max(budget, int64_t(std::ceil(share_ * double(rows))));
}

int64_t Budgets::most(int layer, int kv_heads, int64_t rows) const {
  int64_t most = 0;
  for (int h = 0; h < kv_heads; ++h) most = std::max(most, of(layer, h, rows));
  return most;
}

}  // namespace longkv
