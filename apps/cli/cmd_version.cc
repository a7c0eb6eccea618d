// `longkv version`: build, CPU, instruction-set levels, kernels.
#include <fmt/format.h>

#include <memory>

#include "base/cpu.h"
#include "base/version.h"
#include "card.h"
#include "commands.h"
#include "common.h"
#include "cuda/cards.h"
#include "ops/matmul.h"
#include "output.h"

namespace longkv::cli {

namespace {

struct VersionOptions {
  GlobalOptions global;
  bool measure = false;
};

Status run_version(const VersionOptions& options) {
  LONGKV_TRY(apply_global_options(options.global));
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
    j["kernels"][name]["decode"] = Matmul::kernel_name(type, default_products(), 1);
    j["kernels"][name]["prompt"] = Matmul::kernel_name(type, default_products(), 512);
  }
  if (options.measure) {
    ThreadPool pool(default_threads());
    j["read_bandwidth_gb_s"] = read_bandwidth(pool) / 1e9;
  }
  j["cards"] = cards_json();
  j["cuda"] = cuda_build();
  if (options.global.json) return print(json_text(j));
  std::string text = fmt::format("longkv {} ({}), {}\n", version(), build_commit(), build_compiler());
  text += fmt::format("cpu: {}, {} threads by default\ninstruction sets:", cpu_model_name(), default_threads());
  for (IsaLevel level : available_isa_levels()) {
    text += fmt::format(" {}{}", isa_name(level), level == active_isa() ? " (selected)" : "");
  }
  text += "\n";
  for (const auto& [name, kernels] : j["kernels"].items()) {
    text += fmt::format("{:<5} decode: {}; prompt: {}\n", name, kernels["decode"].get<std::string>(),
                        kernels["prompt"].get<std::string>());
  }
  if (options.measure)
    text += fmt::format("measured read bandwidth: {:.1f} GB/s\n", j["read_bandwidth_gb_s"].get<double>());
  return print(text + cards_text());
}

}  // namespace

void add_version(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<VersionOptions>();
  CLI::App* command = app.add_subcommand("version", "Print version, CPU features and chosen kernels");
  add_global_options(*command, options->global);
  command->add_flag("--bandwidth", options->measure, "Measure and print the memory read bandwidth");
  command->callback([options, &exit_code] { exit_code = report(run_version(*options)); });
}

}  // namespace longkv::cli
