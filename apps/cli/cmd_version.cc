// `longkv version`: build, CPU, instruction-set levels, kernels.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/cpu.h"
#include "base/version.h"
#include "commands.h"
#include "common.h"
#include "ops/matmul.h"

namespace longkv::cli {

namespace {

struct VersionOptions {
  GlobalOptions global;
  bool measure = false;
};

int run_version(const VersionOptions& options) {
  if (const Status s = apply_global_options(options.global); !s.ok()) return report(s);
  nlohmann::ordered_json j;
  j["version"] = version();
  j["commit"] = build_commit();
  j["compiler"] = build_compiler();
  j["cpu"] = cpu_model_name();
  j["threads"] = default_threads();
  for (IsaLevel level : available_isa_levels()) j["isa_available"].push_back(isa_name(level));
  j["isa_selected"] = isa_name(active_isa());
  for (TensorType type : {TensorType::kQ4_0, TensorType::kQ8_0, TensorType::kF16}) {
    const char* name = tensor_type_info(type)->name;
    j["kernels"][name]["decode"] = Matmul::kernel_name(type, ProductType::kInt8, 1);
    j["kernels"][name]["prompt"] = Matmul::kernel_name(type, ProductType::kInt8, 512);
  }
  if (options.measure) {
    ThreadPool pool(default_threads());
    j["read_bandwidth_gb_s"] = read_bandwidth(pool) / 1e9;
  }
  if (options.global.json) {
    std::printf("%s\n", j.dump(2).c_str());
    return 0;
  }
  std::printf("longkv %s (%s), %s\n", version(), build_commit(), build_compiler());
  std::printf("cpu: %s, %d threads by default\n", cpu_model_name().c_str(), default_threads());
  std::printf("instruction sets:");
  for (IsaLevel level : available_isa_levels()) {
    std::printf(" %s%s", isa_name(level), level == active_isa() ? " (selected)" : "");
  }
  std::printf("\n");
  for (const auto& [name, kernels] : j["kernels"].items()) {
    std::printf("%-5s decode: %s; prompt: %s\n", name.c_str(), kernels["decode"].get<std::string>().c_str(),
                kernels["prompt"].get<std::string>().c_str());
  }
  if (options.measure) std::printf("measured read bandwidth: %.1f GB/s\n", j["read_bandwidth_gb_s"].get<double>());
  return 0;
}

}  // namespace

void add_version(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<VersionOptions>();
  CLI::App* command = app.add_subcommand("version", "Print version, CPU features and chosen kernels");
  add_global_options(*command, options->global);
  command->add_flag("--bandwidth", options->measure, "Measure and print the memory read bandwidth");
  command->callback([options, &exit_code] { exit_code = run_version(*options); });
}

}  // namespace longkv::cli
