// The subcommands of longkv: each adds itself to the program and, when chosen, sets the exit code
// (0 good, 1 run failed, 2 usage).
#pragma once

#include <CLI/CLI.hpp>

namespace longkv::cli {

void add_tokenize(CLI::App& app, int& exit_code);

}  // namespace longkv::cli
