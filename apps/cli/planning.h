// The plan of an opened model: what fits, what a token reads.
#pragma once

#include <string>

#include "common.h"
#include "kv/plan.h"

namespace longkv::cli {

// Sizes that --ram sets; 0 = what the system has available.
struct PlanLimits {
  int64_t ram_bytes = 0;
  int64_t bandwidth = 0;   // bytes/s; 0 = time is not predicted
  int64_t disk_bytes = 0;  // free where K and V are to lie; 0: they lie in memory
};

// context 0: the largest that fits, at most the trained one.
Result<KvPlan> plan_for(const LoadedModel& model, const Recipe& recipe, int64_t context, int64_t chunk, int threads,
                        const PlanLimits& limits);

// Files that the recipe names and the plan itself does not read: patterns of prompts, channels of an index. Errors: as
// a run with them would have.
Status check_recipe_files(const Opened& opened);

// A notice for each thing that the recipe names and the model does not have.
Status note_misfits(const Recipe& recipe, const LoadedModel& model);

// `--kv-explain`: canonical recipe, plan and bytes per token to standard output.
Status explain_kv(const Opened& opened, bool json);

}  // namespace longkv::cli
