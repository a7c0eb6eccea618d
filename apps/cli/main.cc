// longkv: command line program. Results go to standard output, messages to standard error.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "apps/cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app("longkv: language models over very long contexts on the CPU", "longkv");
  app.require_subcommand(1);
  int exit_code = 0;
  longkv::cli::add_tokenize(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "error: {} (see longkv --help)\n", error.what());
    return 2;
  }
  return exit_code;
}
