// `longkv bench`: llama-bench's tests and rows, for one or several KV recipes.
#include <algorithm>
#include <chrono>
#include <ctime>
#include <memory>
#include <optional>
#include <random>

#include "base/cpu.h"
#include "base/error.h"
#include "base/log.h"
#include "base/seconds.h"
#include "bench_rows.h"
#include "commands.h"
#include "common.h"
#include "interrupt.h"
#include "model_label.h"
#include "output.h"
#include "planning.h"
#include "recipe_list.h"

namespace longkv::cli {

namespace {

struct BenchOptions {
  GlobalOptions global;
  ModelOptions model;
  std::string prompts = "512", generations = "128", depths = "0", threads, recipes = "full";
  std::vector<std::string> pairs;
  int repetitions = 5;
  std::optional<std::string> output;  // absent: md
  std::string fill = "computed";
  bool no_warmup = false;
};

struct BenchTest {
  int64_t prompt = 0, generate = 0, depth = 0;

  int64_t context() const { return depth + prompt + generate + kWarmupTokens; }
  static constexpr int64_t kWarmupTokens = 32;
};

// Sizes of one test; far above every plan, and their sum cannot overflow.
constexpr int64_t kMaxTokens = int64_t(1) << 40;

// "512,1024-4096+1024,8192-65536*2": numbers with K/M, ranges with an additive or multiplicative step.
Result<std::vector<int64_t>> parse_list(const std::string& text, const std::string& option) {
  std::vector<int64_t> values;
  const auto number = [&](const std::string& item) -> Result<int64_t> {
    LONGKV_ASSIGN(const int64_t v, parse_size(item, option));
    if (v > kMaxTokens)
      return fail(Code::kInvalidArgument, "{} '{}' is out of range; at most {}", option, item, kMaxTokens);
    return v;
  };
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, comma - begin);
    begin = comma + 1;
    const size_t dash = item.find('-');
    if (dash == std::string::npos || dash == 0) {
      LONGKV_ASSIGN(const int64_t v, number(item));
      values.push_back(v);
      continue;
    }
    const size_t step_at = item.find_first_of("+*", dash);
    LONGKV_ASSIGN(const int64_t first, number(item.substr(0, dash)));
    LONGKV_ASSIGN(const int64_t last,
                  number(item.substr(dash + 1, step_at == std::string::npos ? step_at : step_at - dash - 1)));
    if (first > last) return fail(Code::kInvalidArgument, "{}: the range '{}' is empty", option, item);
    int64_t step = 1;
    if (step_at != std::string::npos) {
      LONGKV_ASSIGN(step, number(item.substr(step_at + 1)));
    }
    const bool multiply = step_at != std::string::npos && item[step_at] == '*';
    if (step < (multiply ? 2 : 1) || (multiply && first == 0)) {
      return fail(Code::kInvalidArgument, "{}: the range '{}' does not advance", option, item);
    }
    for (int64_t v = first; v <= last; v = multiply ? v * step : v + step) {
      values.push_back(v);
      if (values.size() > 10000)
        return fail(Code::kInvalidArgument, "{}: more than 10000 values in '{}'", option, item);
    }
  }
  return values;
}

Result<std::vector<BenchTest>> tests_of(const BenchOptions& o) {
  LONGKV_ASSIGN(const auto prompts, parse_list(o.prompts, "-p"));
  LONGKV_ASSIGN(const auto generations, parse_list(o.generations, "-n"));
  LONGKV_ASSIGN(const auto depths, parse_list(o.depths, "-d"));
  std::vector<BenchTest> tests;
  for (int64_t depth : depths) {
    for (int64_t p : prompts) {
      if (p > 0) tests.push_back({p, 0, depth});
    }
    for (int64_t n : generations) {
      if (n > 0) tests.push_back({0, n, depth});
    }
    for (const std::string& pair : o.pairs) {
      LONGKV_ASSIGN(const auto pg, parse_list(pair, "-pg"));
      if (pg.size() != 2 || pg[0] + pg[1] == 0)
        return fail(Code::kInvalidArgument, "-pg '{}' must be two numbers, prompt,generate", pair);
      tests.push_back({pg[0], pg[1], depth});
    }
  }
  if (tests.empty()) return fail(Code::kInvalidArgument, "nothing to measure: -p, -n and -pg are all 0");
  return tests;
}

Result<BenchFormat> format_of(const BenchOptions& o) {
  const std::string output = o.output.value_or(o.global.json ? "json" : "md");
  if (o.global.json && output != "json" && output != "jsonl")
    return fail(Code::kInvalidArgument, "--json and -o {} contradict each other", output);
  if (output == "csv") return BenchFormat::kCsv;
  if (output == "jsonl") return BenchFormat::kJsonLines;
  return output == "json" ? BenchFormat::kJson : BenchFormat::kMarkdown;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

class BenchRunner {
 public:
  BenchRunner(const Opened& opened, const BenchOptions& options, const std::atomic<bool>* cancel)
      : opened_(opened), options_(options), cancel_(cancel), random_(1) {}

  // Brings the session to `depth`, then times the repetitions; between them the sequence is cut back to that depth.
  Status measure(const BenchTest& test, BenchRow& row) {
    LONGKV_TRY(start(test));
    if (!options_.no_warmup)
      LONGKV_TRY(
          repeat({std::min(test.prompt, BenchTest::kWarmupTokens), std::min<int64_t>(test.generate, 2), test.depth}));
    session_->reset_kv_stats();
    for (int i = 0; i < options_.repetitions; ++i) {
      LONGKV_TRY(rewind(test));
      const auto begin = std::chrono::steady_clock::now();
      LONGKV_TRY(repeat(test));
      row.seconds.push_back(seconds_since(begin));
    }
    const KvStats& stats = session_->kv_stats();
    if (test.prompt == 0 && stats.steps > 0) {
      row.kv_bytes_per_token = double(stats.kv_bytes + stats.index_bytes) / double(stats.steps);
      row.weight_bytes_per_token = double(opened_.model->weights().bytes_per_token());
      row.bus_bytes_per_token = double(stats.bus_bytes) / double(stats.steps);
      const int64_t blocks = stats.blocks_found + stats.blocks_fetched;
      row.blocks_found = blocks > 0 ? double(stats.blocks_found) / double(blocks) : 0.0;
    }
    return {};
  }

  bool on_card() const { return session_->on_card(); }

 private:
  Status start(const BenchTest& test) {
    session_.reset();
    LONGKV_ASSIGN(session_, make_session(opened_, test.context()));
    if (test.depth == 0) return {};
    if (options_.fill == "random") return session_->fill_random(test.depth, 1);
    return session_->prefill(random_ids(test.depth), {}, cancel_);
  }

  Status rewind(const BenchTest& test) {
    if (session_->tokens() == test.depth) return {};
    if (session_->truncate(test.depth).ok()) return {};
    // Sliding windows may have dropped rows that the shorter sequence needs.
    LONGKV_TRY(start(test));
    return {};
  }

  Status repeat(const BenchTest& test) {
    if (test.prompt > 0) LONGKV_TRY(session_->prefill(random_ids(test.prompt), {}, cancel_));
    for (int64_t i = 0; i < test.generate; ++i) {
      if (cancel_->load()) return fail(Code::kCancelled, "interrupted");
      LONGKV_TRY(session_->decode(random_ids(1).front()));
    }
    return {};
  }

  std::vector<int32_t> random_ids(int64_t n) {
    std::uniform_int_distribution<int32_t> id(0, int32_t(opened_.model->config().vocab - 1));
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n; ++i) ids.push_back(id(random_));
    return ids;
  }

  const Opened& opened_;
  const BenchOptions& options_;
  const std::atomic<bool>* cancel_;
  std::mt19937 random_;
  std::unique_ptr<Session> session_;
};

// Rows in the chosen format. What was printed is a whole document also when a later test fails.
class RowPrinter {
 public:
  explicit RowPrinter(BenchFormat format) : format_(format) {}

  Status row(const BenchRow& row) {
    const std::string header = rows_ == 0 ? bench_header(format_) : "";
    return print(header + bench_row(format_, row, rows_++ == 0));
  }
  Status finish() { return rows_ > 0 ? print(bench_footer(format_)) : Status(); }

 private:
  BenchFormat format_;
  int64_t rows_ = 0;
};

Status check_memory(const Opened& opened, const std::vector<BenchTest>& tests) {
  PlanLimits limits;
  limits.disk_bytes = opened.disk_bytes;
  for (const BenchTest& test : tests) {
    LONGKV_ASSIGN(const KvPlan plan,
                  plan_for(*opened.model, opened.recipe, test.context(), opened.chunk, opened.pool->threads(), limits));
    LONGKV_TRY(check_plan(plan));
  }
  return {};
}

// All tests of one recipe and thread count. `bandwidth` is measured by the first call.
Status run_tests(const BenchOptions& o, const ModelOptions& m, const std::vector<BenchTest>& tests,
                 const std::atomic<bool>* cancel, double& bandwidth, RowPrinter& printer) {
  LONGKV_ASSIGN(const Opened opened, open_model(m));
  if (opened.rows_in_memory()) LONGKV_TRY(check_memory(opened, tests));
  if (bandwidth == 0) bandwidth = read_bandwidth(*opened.pool, cancel);
  if (cancel->load()) return fail(Code::kCancelled, "interrupted");
  BenchRunner runner(opened, o, cancel);
  for (const BenchTest& test : tests) {
    BenchRow row;
    row.model_path = m.model;
    row.model_type = model_label(*opened.model);
    row.model_bytes = model_bytes(*opened.model);
    row.model_parameters = model_parameters(*opened.model);
    row.threads = opened.pool->threads();
    row.chunk = opened.chunk;
    row.layers = opened.model->config().layers;
    row.repacked = opened.model->packed_bytes() > 0;
    row.products = product_name(opened.products);
    row.kv = opened.recipe.canonical();
    row.kv_label = *m.kv;
    row.type_k = kv_type_name(opened.recipe.store.k);
    row.type_v = kv_type_name(opened.recipe.store.v);
    row.random_fill = o.fill == "random" && test.depth > 0;
    row.prompt = test.prompt;
    row.generate = test.generate;
    row.depth = test.depth;
    row.test_time = utc_now();
    row.read_bandwidth = bandwidth;
    const int64_t streamed = opened.card ? opened.card->streamed_bytes() : 0;
    LONGKV_TRY(runner.measure(test, row));
    if (runner.on_card()) {
      row.card = opened.card->device().name;
      row.products = "f16";
      row.host_layers = opened.card->host_layers();
      row.streamed_bytes = opened.card->streamed_bytes() - streamed;
      row.backend = row.host_layers > 0 ? "CUDA+CPU" : "CUDA";
      row.backend += opened.card_hybrid ? ",kv=hybrid" : opened.card_kv ? "" : ",kv=cpu";
      if (opened.card_kv) row.read_bandwidth = opened.card->bandwidth();
      row.vram_peak = opened.card->vram_peak();
    }
    LONGKV_TRY(printer.row(row));
    if (row.host_layers > 0) {
      log_info("{}: {} of {} layers in memory; {} MiB of their weights crossed the bus; {} MiB of VRAM",
               row.test_name(), row.host_layers, opened.model->config().layers, row.streamed_bytes >> 20,
               row.vram_peak >> 20);
    }
    if (row.bus_bytes_per_token > 0) {
      log_info("{}: {:.1f}% of the attended blocks lay on the card; {:.1f} MB a token crossed the bus; {} MiB of VRAM",
               row.test_name(), 100 * row.blocks_found, row.bus_bytes_per_token / 1e6, row.vram_peak >> 20);
    }
  }
  return {};
}

Status run_bench(const BenchOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_ASSIGN(const std::vector<BenchTest> tests, tests_of(o));
  std::vector<int64_t> threads = {default_threads()};
  if (!o.threads.empty()) {
    LONGKV_ASSIGN(threads, parse_list(o.threads, "-t"));
  }
  for (int64_t t : threads) {
    if (t < 1 || t > 4096) return fail(Code::kInvalidArgument, "-t {} must lie between 1 and 4096", t);
  }
  LONGKV_ASSIGN(const BenchFormat format, format_of(o));
  if (o.fill == "random" && std::all_of(tests.begin(), tests.end(), [](const BenchTest& t) { return t.depth == 0; }))
    LONGKV_TRY(notice("--fill random has no effect: -d names no depth above 0"));
  const std::vector<std::string> recipes = split_recipes(o.recipes);
  for (const std::string& recipe : recipes) LONGKV_TRY(load_recipe(recipe).status());  // before any work

  const std::atomic<bool>* cancel = install_interrupt_flag();
  RowPrinter printer(format);
  for (int64_t n : threads) {
    double bandwidth = 0;
    for (const std::string& recipe : recipes) {
      ModelOptions m = o.model;
      m.threads = int(n);
      m.kv = recipe;
      m.can_use_card = m.can_use_disk = true;
      for (const BenchTest& test : tests) m.card_context = std::max(m.card_context, test.context());
      Status s = run_tests(o, m, tests, cancel, bandwidth, printer);
      if (!s.ok()) {
        (void)printer.finish();  // the first error is the one to report
        return s;
      }
    }
  }
  return printer.finish();
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Measure prompt and decode speed at depth; llama-bench's rows");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/false);
  command->remove_option(command->get_option("--threads"));
  command->remove_option(command->get_option("--ctx-size"));
  command->add_option("-t,--threads", o->threads, "Threads; a list is measured one after another");
  command->add_option("-p,--n-prompt", o->prompts, "Prompt sizes: list or range (512,1K-4K*2)")->capture_default_str();
  command->add_option("-n,--n-gen", o->generations, "Tokens to generate: list or range")->capture_default_str();
  command->add_option("--pg", o->pairs, "prompt,generate pair (-pg 512,128); may be repeated")->allow_extra_args(false);
  command->add_option("-d,--n-depth", o->depths, "Tokens in the cache before the test: list or range")
      ->capture_default_str();
  command->add_option("-r,--repetitions", o->repetitions, "Repetitions")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("-o,--output", o->output, "md, csv, json or jsonl")
      ->check(CLI::IsMember({"md", "csv", "json", "jsonl"}))
      ->default_str("md");
  command->add_option("--kv", o->recipes, "KV recipes, comma separated")->capture_default_str();
  command->add_option("--fill", o->fill, "Depth by computed or random keys and values (said in the row)")
      ->check(CLI::IsMember({"computed", "random"}))
      ->capture_default_str();
  command->add_flag("--no-warmup", o->no_warmup, "Skip the warm-up run");
  command->callback([o, &exit_code] { exit_code = report(run_bench(*o)); });
}

}  // namespace longkv::cli
