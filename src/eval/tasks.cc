#include "eval/tasks.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "eval/text.h"

namespace longkv {

namespace {

// Ruler: the eleven of RULER's thirteen tasks that need no data set.
const std::vector<std::pair<std::string, std::vector<std::string>>>& groups() {
  static const std::vector<std::string> kNeedles = {"niah_single_1",   "niah_single_2",   "niah_single_3",
                                                    "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
                                                    "niah_multivalue", "niah_multiquery"};
  static const auto kAll = [] {
    std::vector<std::pair<std::string, std::vector<std::string>>> g;
    g.emplace_back("niah", kNeedles);
    g.emplace_back("ruler", kNeedles);
    for (const char* more : {"vt", "cwe", "fwe"}) g.back().second.emplace_back(more);
    g.emplace_back("story", std::vector<std::string>{"story_retrieval", "story_filter", "story_multihop"});
    g.emplace_back("all", std::vector<std::string>{});
    for (const EvalTask& t : eval_tasks()) g.back().second.push_back(t.name);
    return g;
  }();
  return kAll;
}

}  // namespace

const char* prompt_form_name(PromptForm form) { return form == PromptForm::kPlain ? "plain" : "needle-10m"; }

const std::vector<EvalTask>& eval_tasks() {
  static const std::vector<EvalTask> kTasks = [] {
    std::vector<EvalTask> t;
    add_needle_tasks(t);
    add_pair_tasks(t);
    add_tracking_tasks(t);
    add_counting_tasks(t);
    add_story_tasks(t);
    add_symbolic_tasks(t);
    return t;
  }();
  return kTasks;
}

const EvalTask* find_eval_task(const std::string& name) {
  for (const EvalTask& task : eval_tasks()) {
    if (task.name == name) return &task;
  }
  return nullptr;
}

Result<std::vector<const EvalTask*>> choose_tasks(const std::vector<std::string>& names) {
  std::vector<const EvalTask*> chosen;
  const auto add = [&](const EvalTask* task) {
    if (std::find(chosen.begin(), chosen.end(), task) == chosen.end()) chosen.push_back(task);
  };
  for (const std::string& name : names) {
    if (const EvalTask* task = find_eval_task(name)) {
      add(task);
      continue;
    }
    const auto group = std::find_if(groups().begin(), groups().end(), [&](const auto& g) { return g.first == name; });
    if (group == groups().end()) {
      std::string known;
      for (const EvalTask& t : eval_tasks()) known += (known.empty() ? "" : ", ") + t.name;
      return fail(Code::kInvalidArgument, "task '{}' is not known; known are {}; groups: niah, ruler, story, all", name,
                  known);
    }
    for (const std::string& member : group->second) add(find_eval_task(member));
  }
  return chosen;
}

double depth_of(const std::vector<double>& grid, int64_t index) {
  const auto n = int64_t(grid.size());
  // Steps of about the golden section that meet every point of the grid.
  int64_t step = std::max<int64_t>(1, std::llround(double(n) * 0.618));
  while (std::gcd(step, n) != 1) ++step;
  return grid[size_t((index % n) * step % n)];
}

}  // namespace longkv
