// Help that fits a screen: options of the group kMore are listed by --help-all only.
#pragma once

#include <CLI/CLI.hpp>

namespace longkv::cli {

inline constexpr const char* kMore = "More";

// Call before subcommands are added; they take it over.
void set_up_help(CLI::App& app);

}  // namespace longkv::cli
