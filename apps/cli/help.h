// Help that fits a screen of 80 columns: options of the group kMore are listed by --help-all only.
#pragma once

#include <CLI/CLI.hpp>

#include "longkv/status.h"

namespace longkv::cli {

inline constexpr const char* kMore = "More";

// Call before subcommands are added; they take it over.
void set_up_help(CLI::App& app);

// Help as the option library's `request` asks for it, to standard output. Errors: kIo.
Status print_help(const CLI::App& app, const CLI::Error& request);

}  // namespace longkv::cli
