// One function for each subcommand: it registers the command's options on `app` and, when the command was chosen, runs
// it and stores its exit code (0 good, 1 the run failed, 2 usage).
#pragma once

#include <CLI/CLI.hpp>

namespace longkv::cli {

void add_bench(CLI::App& app, int& exit_code);
void add_chat(CLI::App& app, int& exit_code);
void add_eval(CLI::App& app, int& exit_code);
void add_eval_kv(CLI::App& app, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_kv(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_ppl(CLI::App& app, int& exit_code);
void add_score(CLI::App& app, int& exit_code);
void add_search_prefill(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_serve(CLI::App& app, int& exit_code);
void add_train(CLI::App& app, int& exit_code);
void add_tokenize(CLI::App& app, int& exit_code);
void add_version(CLI::App& app, int& exit_code);

}  // namespace longkv::cli
