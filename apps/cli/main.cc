#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "commands.h"
#include "help.h"
#include "output.h"

namespace {

// llama.cpp's short flags of several letters; the option library reads them as "--ctk" and so on.
std::vector<std::string> read_arguments(int argc, char** argv) {
  static constexpr std::string_view kShort[] = {"-ctk", "-ctv", "-ub", "-fa", "-pg", "-sys"};
  std::vector<std::string> args;
  for (int i = argc - 1; i > 0; --i) {  // the library wants them in reverse
    const std::string_view arg = argv[i];
    const std::string_view name = arg.substr(0, arg.find('='));
    const bool is_short = std::find(std::begin(kShort), std::end(kShort), name) != std::end(kShort);
    args.push_back(is_short ? "-" + std::string(arg) : std::string(arg));
  }
  if (args.size() == 1 && args.front() == "--version") args.front() = "version";
  return args;
}

}  // namespace

int main(int argc, char** argv) {
  // CLI11 reports bad usage by exceptions; they end here and become exit code 2.
  longkv::cli::claim_standard_streams();
  int exit_code = 0;
  CLI::App app{"longkv runs language models over very long prompts on the machine you have.", "longkv"};
  app.require_subcommand(1);
  longkv::cli::set_up_help(app);
  longkv::cli::add_run(app, exit_code);
  longkv::cli::add_chat(app, exit_code);
  longkv::cli::add_bench(app, exit_code);
  longkv::cli::add_eval_kv(app, exit_code);
  longkv::cli::add_ppl(app, exit_code);
  longkv::cli::add_plan(app, exit_code);
  longkv::cli::add_inspect(app, exit_code);
  longkv::cli::add_tokenize(app, exit_code);
  longkv::cli::add_version(app, exit_code);
  try {
    app.parse(read_arguments(argc, argv));
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // help
    std::fprintf(stderr, "error: %s\nRun 'longkv --help' or 'longkv COMMAND --help'.\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: internal: %s\n", e.what());
    return 1;
  }
  return exit_code;
}
