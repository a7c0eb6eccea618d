// A plan as text and as JSON, and the memory that it is held against.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "kv/plan.h"

namespace longkv {

std::string format_bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = double(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string plan_text(const KvPlan& plan) {
  std::string out = fmt::format("recipe     {}\n           {}\n", plan.recipe.name, plan.recipe.canonical());
  for (const std::string& note : plan.recipe.notes) out += fmt::format("           note: {}\n", note);
  out += fmt::format("context    {} tokens", plan.context);
  if (plan.model.trained_context > 0) out += fmt::format(" (trained for {})", plan.model.trained_context);
  out += fmt::format("; largest that fits: {}\n", plan.largest_context);
  out += fmt::format("memory     {} of {} available{}\n", format_bytes(plan.peak_bytes),
                     format_bytes(plan.machine.ram_bytes), plan.fits() ? "" : "  DOES NOT FIT");
  const auto part = [&](const char* what, int64_t bytes) {
    out += fmt::format("           {:<24}{:>12}\n", what, format_bytes(bytes));
  };
  part("weights (mapped)", plan.model.weight_bytes);
  part(plan.on_disk() ? "K (on disk)" : "K", plan.k_bytes);
  part(plan.on_disk() ? "V (on disk)" : "V", plan.v_bytes);
  if (plan.field_bytes > 0) part("positions and biases", plan.field_bytes);
  part("index", plan.index_bytes);
  part("while reading a prompt", plan.prompt_bytes);
  part("scratch", plan.model.scratch_bytes);
  if (plan.on_disk()) {
    out += fmt::format("disk       {} of {} free{}\n", format_bytes(plan.disk_needed()),
                       format_bytes(plan.machine.disk_bytes),
                       plan.disk_needed() <= plan.machine.disk_bytes ? "" : "  DOES NOT FIT");
  }
  out += fmt::format("per token  {} read at that depth\n", format_bytes(plan.read_bytes));
  part("weights", plan.model.weight_bytes_per_token);
  part("K and V rows", plan.read_rows_bytes);
  part("index", plan.read_index_bytes);
  out += fmt::format("layers     {} dense, {} choosing, {} reusing a choice, {} evicting\n", plan.dense_layers,
                     plan.choosing_layers, plan.reusing_layers, plan.evicting_layers);
  if (plan.token_seconds > 0) {
    out += fmt::format("time       {:.2f} ms per token ({:.1f} tokens/s) at {:.1f} GB/s with {} threads\n",
                       1e3 * plan.token_seconds, 1.0 / plan.token_seconds, 1e-9 * double(plan.machine.bandwidth),
                       plan.machine.threads);
  }
  return out;
}

nlohmann::json plan_json(const KvPlan& plan) {
  return {
      {"recipe", {{"name", plan.recipe.name}, {"canonical", plan.recipe.canonical()}, {"notes", plan.recipe.notes}}},
      {"context", plan.context},
      {"trained_context", plan.model.trained_context},
      {"largest_context", plan.largest_context},
      {"fits", plan.fits()},
      {"memory",
       {{"available", plan.machine.ram_bytes},
        {"peak", plan.peak_bytes},
        {"weights", plan.model.weight_bytes},
        {"k", plan.k_bytes},
        {"v", plan.v_bytes},
        {"fields", plan.field_bytes},
        {"index", plan.index_bytes},
        {"prompt", plan.prompt_bytes},
        {"scratch", plan.model.scratch_bytes}}},
      {"disk", {{"available", plan.machine.disk_bytes}, {"needed", plan.disk_needed()}}},
      {"read_per_token",
       {{"total", plan.read_bytes},
        {"weights", plan.model.weight_bytes_per_token},
        {"rows", plan.read_rows_bytes},
        {"index", plan.read_index_bytes}}},
      {"layers",
       {{"dense", plan.dense_layers},
        {"choosing", plan.choosing_layers},
        {"reusing", plan.reusing_layers},
        {"evicting", plan.evicting_layers}}},
      {"bandwidth", plan.machine.bandwidth},
      {"threads", plan.machine.threads},
      {"token_seconds", plan.token_seconds},
  };
}

int64_t available_ram_bytes() {
  int64_t available = 0;
  std::ifstream in("/proc/meminfo");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("MemAvailable:", 0) == 0) available = std::strtoll(line.c_str() + 13, nullptr, 10) * 1024;
  }
  const auto number = [](const char* path) -> int64_t {
    std::ifstream file(path);
    int64_t value = -1;
    file >> value;  // "max" leaves -1
    return file ? value : -1;
  };
  // Pages of files that the group has read can be dropped, so they do not count as used.
  int64_t dropped = 0;
  std::ifstream stat("/sys/fs/cgroup/memory.stat");
  for (std::string line; std::getline(stat, line);) {
    if (line.rfind("inactive_file ", 0) == 0 || line.rfind("active_file ", 0) == 0) {
      dropped += std::strtoll(line.c_str() + line.find(' '), nullptr, 10);
    }
  }
  const int64_t limit = number("/sys/fs/cgroup/memory.max");
  const int64_t used = number("/sys/fs/cgroup/memory.current");
  if (limit > 0 && used >= 0)
    available = std::min(available, std::max<int64_t>(0, limit - std::max<int64_t>(0, used - dropped)));
  return available;
}

}  // namespace longkv
