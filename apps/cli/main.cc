#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "commands.h"
#include "common.h"
#include "help.h"
#include "interrupt.h"
#include "output.h"
#include "usage.h"

namespace {

int usage_error(const std::string& message) {
  std::fprintf(stderr, "error: %s\nRun 'longkv --help' or 'longkv COMMAND --help'.\n", message.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace longkv::cli;
  claim_standard_streams();
  prepare_signals();
  // CLI11 reports bad usage by exceptions; they end here and become exit code 2.
  int exit_code = 0;
  CLI::App app{"longkv runs language models over very long prompts on the machine you have.", "longkv"};
  app.require_subcommand(1);
  set_up_help(app);
  add_run(app, exit_code);
  add_chat(app, exit_code);
  add_serve(app, exit_code);
  add_bench(app, exit_code);
  add_ppl(app, exit_code);
  add_eval(app, exit_code);
  add_eval_kv(app, exit_code);
  add_score(app, exit_code);
  add_kv(app, exit_code);
  add_plan(app, exit_code);
  add_search_prefill(app, exit_code);
  add_inspect(app, exit_code);
  add_train(app, exit_code);
  add_tokenize(app, exit_code);
  add_version(app, exit_code);
  check_values_strictly(app);
  std::vector<std::string> arguments = library_spelling({argv + 1, argv + argc});
  if (arguments.size() == 1 && arguments.front() == "--version") arguments.front() = "version";
  if (!arguments.empty() && arguments.front() == "help") {  // "help run" as "run --help"
    arguments.erase(arguments.begin());
    arguments.emplace_back("--help");
  }
  try {
    const std::string unknown = unknown_name(app, arguments);
    if (!unknown.empty()) return usage_error(unknown);
    std::reverse(arguments.begin(), arguments.end());  // as the library wants them
    app.parse(arguments);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) return usage_error(plain_words(e.what()));
    return end_by_signal(report(print_help(app, e)));
  } catch (const std::bad_alloc&) {
    std::fprintf(
        stderr,
        "error: out of memory: the system gave no more, by a limit (ulimit -v, a container's) or because others "
        "hold it; raise the limit, or use a smaller -c, -ub or -t\n");
    return 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: internal: %s\n", e.what());
    return 1;
  }
  return end_by_signal(exit_code);
}
