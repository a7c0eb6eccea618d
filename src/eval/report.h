// The page that a person looks at: one file, readable without a network.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "eval/store.h"
#include "eval/summary.h"

namespace longkv {

struct ReportPlot {
  std::string name;  // of a file: "budget-32K-vt"; the same name again: a further panel
  std::string svg;
};
// In the order of the page.
std::vector<ReportPlot> report_plots(std::span<const EvalRecord> records, const Summary& summary);
std::string report_html(const EvalRunInfo& info, std::span<const EvalRecord> records, const Summary& summary);
nlohmann::ordered_json summary_json(const Summary& summary);

// Which recipes differ in nothing but the budget: "quest:budget=512" -> {"quest", 512}. No budget: {label, 0}.
struct BudgetLabel {
  std::string family;
  int64_t budget = 0;
};
BudgetLabel split_budget(const std::string& label);

}  // namespace longkv
