// Tasks that are generated: from their identity alone, at any length.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "eval/haystack.h"
#include "eval/sample.h"
#include "longkv/status.h"

namespace longkv {

// How questions are worded: for models that follow instructions, or as needle-10m-128k was trained (models/README.md).
enum class PromptForm { kPlain, kNeedle10m };
const char* prompt_form_name(PromptForm form);

struct TaskRequest {
  SampleId id;
  PromptForm form = PromptForm::kPlain;
  const Haystack* haystack = nullptr;
};

struct EvalTask {
  std::string name;
  int version = 1;  // a change of wording or construction is a new version
  std::string about;
  std::string unit;  // what a prompt is made longer by
  int64_t min_units = 1;
  int64_t max_units = int64_t(1) << 40;
  bool has_depth = false;
  bool needle_form = false;  // needle-10m-128k knows it
  // The sample with `units` units. More units: a longer context, the same question and facts.
  std::function<EvalSample(const TaskRequest&, int64_t units)> build;
};

// All, in the order of documentation.
const std::vector<EvalTask>& eval_tasks();
const EvalTask* find_eval_task(const std::string& name);
// Names and groups (niah, ruler, story, all) as tasks. Errors: kInvalidArgument with the nearest or all names.
Result<std::vector<const EvalTask*>> choose_tasks(const std::vector<std::string>& names);

// Depth of sample `index` over a grid of percents: any number of samples is spread over it.
double depth_of(const std::vector<double>& grid, int64_t index);

// Parts of eval_tasks().
void add_needle_tasks(std::vector<EvalTask>& tasks);
void add_pair_tasks(std::vector<EvalTask>& tasks);
void add_tracking_tasks(std::vector<EvalTask>& tasks);
void add_counting_tasks(std::vector<EvalTask>& tasks);
void add_story_tasks(std::vector<EvalTask>& tasks);
void add_symbolic_tasks(std::vector<EvalTask>& tasks);

// `needles` among `units`, joined by `separator`, each at its percent of the units; 100 appends. Several at the same
// place stand in their order.
struct Planted {
  double depth = 0;
  std::string text;
};
std::string plant(const std::vector<std::string>& units, const std::vector<Planted>& needles,
                  const std::string& separator);
// Sentences that say nothing and repeat.
std::vector<std::string> noise_sentences(int64_t n);

}  // namespace longkv
