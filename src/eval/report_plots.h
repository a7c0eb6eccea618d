// The report's plots, each over all recipes.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "eval/store.h"
#include "eval/summary.h"

namespace longkv {

// Labels in the order of the summary: full attention first.
std::vector<std::string> report_labels(const Summary& summary);

// Needle heat maps: one a recipe, over lengths and depths, of all tasks with a depth. Empty when there are none.
std::vector<std::string> plot_needles(std::span<const EvalRecord> records, const Summary& summary);
std::string plot_tasks(const Summary& summary, int64_t length);  // recipe x task
// Score against rows, of a task or (empty) the mean over tasks, with the oracle's line; empty below two budgets.
std::string plot_budgets(const Summary& summary, int64_t length, const std::string& task);
std::string plot_bytes(const Summary& summary, int64_t length);  // score against bytes, Pareto line
std::string plot_speed(const Summary& summary, int64_t length);  // score against tokens/s, Pareto line
enum class CostPlot { kDecode, kFirstToken, kMemory };
std::string plot_cost(const Summary& summary, CostPlot what);         // against length; empty below two lengths
std::string plot_mass(const Summary& summary, int64_t length);        // recipe x layer and KV head
std::string plot_divergence(const Summary& summary, int64_t length);  // KL by quarter of the continuation

}  // namespace longkv
