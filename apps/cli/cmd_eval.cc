// `longkv eval`: tasks at several lengths under many KV recipes, compared with full attention on the same prompts.
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <tuple>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "base/version.h"
#include "commands.h"
#include "common.h"
#include "eval/data/datasets.h"
#include "eval/report.h"
#include "eval/runner.h"
#include "eval/summary.h"
#include "eval/text.h"
#include "help.h"
#include "interrupt.h"
#include "kv/plan.h"
#include "model_label.h"
#include "output.h"
#include "planning.h"
#include "prompt.h"
#include "recipe_list.h"

namespace longkv::cli {

namespace {

struct EvalCommand {
  GlobalOptions global;
  ModelOptions model;
  std::string tasks = "niah_multikey_1,kv_retrieval,vt", recipes = "full,quest", lengths = "8K",
              depths = "0,10,20,30,40,50,60,70,80,90,100";
  std::string dir, question = "hidden", haystack = "grammar", form = "auto", chat_template;
  std::vector<std::string> data;
  std::string data_tasks, jieba;
  bool raw = false, list = false, tasks_given = false, report_only = false;
  int64_t samples = 10, noise = 1, seed = 1;
  int check_every = 4, jobs = 1;
  std::string ram, prompts;
};

std::vector<std::string> split_commas(const std::string& text) {
  std::vector<std::string> pieces(1);
  for (const char c : text) {
    if (c == ',') {
      pieces.emplace_back();
    } else {
      pieces.back() += c;
    }
  }
  return pieces;
}

Result<std::vector<double>> parse_depths(const std::string& text) {
  std::vector<double> depths;
  for (const std::string& piece : split_commas(text)) {
    char* end = nullptr;
    const double d = std::strtod(piece.c_str(), &end);
    if (piece.empty() || *end != '\0' || !(d >= 0 && d <= 100)) {
      return fail(Code::kInvalidArgument, "--depths '{}' must be percents from 0 to 100", piece);
    }
    depths.push_back(d);
  }
  return depths;
}

// The file's bytes, so that results of two quantisations or two trainings never meet.
Result<std::string> model_hash(const std::string& path) {
  LONGKV_ASSIGN(const MappedFile file, MappedFile::open(path));
  const XXH128_hash_t h = XXH3_128bits(file.bytes().data(), file.bytes().size());
  return fmt::format("{:016x}{:016x}", h.high64, h.low64);
}

// The machine part that computes the prompts' keys and values.
std::string reader_name(const Opened& opened) { return opened.card ? opened.card->device().name : "CPU"; }

// What must be the same for a run to go on in a folder. "note" is for readers.
Result<EvalRunInfo> describe_run(const EvalCommand& o, const Opened& opened, const EvalOptions& options,
                                 const PromptMaker& maker, const std::vector<DatasetFile>& files) {
  EvalRunInfo info;
  info["format"] = EvalStore::kFormat;
  info["longkv"] = version();
  LONGKV_ASSIGN(info["model_hash"], model_hash(o.model.model));
  info["model"] = model_label(*opened.model);
  info["rope"] = fmt::format("{} {} {}", o.model.rope_scaling.empty() ? "file" : o.model.rope_scaling,
                             o.model.rope_scale.value_or(0), o.model.rope_base.value_or(0));
  info["products"] = product_name(opened.products);
  info["form"] = prompt_form_name(options.form);
  info["chat"] = maker.chat() == nullptr ? "raw" : maker.chat()->description();
  info["question"] = o.question;
  info["seed"] = o.seed;
  info["haystack"] = options.haystack->name();
  info["haystack_sha256"] = options.haystack->sha256();
  info["kv_check"] = o.check_every;
  info["prompts_read_on"] = reader_name(opened);
  info["data"] = EvalRunInfo::object();
  for (const DatasetFile& file : files) info["data"][file.name] = file.sha256;
  info["note"]["model_file"] = o.model.model;
  info["note"]["commit"] = build_commit();
  info["note"]["threads"] = opened.pool->threads();
  info["note"]["prompts_at_a_time"] = o.jobs;
  info["note"]["context"] = opened.context;
  return info;
}

std::string duration(double seconds) {
  if (seconds < 90) return fmt::format("{:.0f} s", seconds);
  return seconds < 5400 ? fmt::format("{:.0f} min", seconds / 60) : fmt::format("{:.1f} h", seconds / 3600);
}

// In place on a terminal, elsewhere a line a prompt.
std::function<void(const EvalProgress&)> show_progress() {
  if (log_level() < LogLevel::kInfo) return {};
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  return [terminal](const EvalProgress& p) {
    const int64_t computed = p.prompts - p.known;
    std::string left;
    if (computed > 0 && p.prompts < p.prompts_total) {
      left = ", about " + duration(p.seconds / double(computed) * double(p.prompts_total - p.prompts)) + " left";
    }
    const std::string text = fmt::format("{} of {} prompts{}{}{}", p.prompts, p.prompts_total,
                                         p.known > 0 ? fmt::format(" ({} were there)", p.known) : "", left,
                                         p.now.empty() ? "" : "; now " + p.now);
    std::fprintf(stderr, terminal ? "\r%-100s%s" : "%s%s", text.c_str(), terminal && !p.now.empty() ? "" : "\n");
  };
}

Result<EvalOptions> parse_options(const EvalCommand& o) {
  EvalOptions options;
  if (!o.data_tasks.empty() && o.data.empty())
    return fail(Code::kInvalidArgument, "--data-tasks chooses from --data, which is not given");
  LONGKV_ASSIGN(options.tasks, choose_tasks(split_commas(o.tasks)));
  for (const std::string& text : split_recipes(o.recipes)) {
    LONGKV_ASSIGN(Recipe recipe, load_recipe(text));
    for (const std::string& note : recipe.notes) LONGKV_TRY(notice(recipe.name + ": " + note));
    const bool known = std::any_of(options.recipes.begin(), options.recipes.end(),
                                   [&](const EvalRecipe& r) { return r.recipe == recipe; });
    if (recipe != Recipe{} && !known) options.recipes.push_back({std::move(recipe), text});
  }
  for (const std::string& text : split_commas(o.lengths)) {
    LONGKV_ASSIGN(const int64_t length, parse_size(text, "--lengths"));
    if (length < 1) return fail(Code::kInvalidArgument, "--lengths '{}' must be positive", text);
    options.lengths.push_back(length);
  }
  LONGKV_ASSIGN(options.depths, parse_depths(o.depths));
  options.samples = o.samples;
  options.noise = o.noise;
  options.seed = uint64_t(o.seed);
  options.play.question_seen = o.question == "seen";
  options.play.check_every = o.check_every;
  options.play.in_step = o.jobs > 1;
  return options;
}

// Samples and tasks of the user's files; without --tasks they are all there is to do.
Result<std::vector<std::unique_ptr<EvalTask>>> add_data(const EvalCommand& o, EvalOptions& options,
                                                        std::vector<DatasetFile>& files) {
  std::vector<std::unique_ptr<EvalTask>> made;
  if (!o.data.empty() && !o.tasks_given) options.tasks.clear();
  for (const std::string& text : o.data) {
    DatasetRequest request;
    std::tie(request.kind, request.path) = split_dataset_name(text);
    request.samples = o.samples;
    request.seed = uint64_t(o.seed);
    request.jieba = o.jieba;
    if (!o.data_tasks.empty()) request.tasks = split_commas(o.data_tasks);
    LONGKV_ASSIGN(Dataset dataset, read_dataset(request));
    for (EvalSample& sample : dataset.samples) options.given.push_back(std::move(sample));
    for (EvalTask& task : dataset.tasks) {
      made.push_back(std::make_unique<EvalTask>(std::move(task)));
      options.tasks.push_back(made.back().get());
    }
    files.insert(files.end(), dataset.files.begin(), dataset.files.end());
    log_info("{}: {}, {} samples", text, dataset.kind, dataset.samples.size());
  }
  return made;
}

Status choose_form(const EvalCommand& o, const Opened& opened, EvalOptions& options) {
  const bool needle = opened.model->config().name.find("needle-10m") != std::string::npos;
  options.form = o.form == "needle-10m" || (o.form == "auto" && needle) ? PromptForm::kNeedle10m : PromptForm::kPlain;
  if (options.form == PromptForm::kPlain || options.tasks.empty()) return {};
  std::string known, unknown;
  for (const EvalTask& t : eval_tasks()) known += t.needle_form ? (known.empty() ? "" : ", ") + t.name : "";
  for (const EvalTask* task : options.tasks) {
    if (!task->needle_form) unknown += (unknown.empty() ? "" : ", ") + task->name;
  }
  std::erase_if(options.tasks, [](const EvalTask* task) { return !task->needle_form; });
  if (options.tasks.empty()) {
    return fail(Code::kInvalidArgument, "needle-10m-128k was not trained for {}; it knows {}", unknown, known);
  }
  return unknown.empty() ? Status() : notice("needle-10m-128k was not trained for " + unknown + ", left out");
}

// Threads of the jobs, and for each the other number of them that the noise floor takes.
struct Pools {
  std::vector<std::unique_ptr<ThreadPool>> jobs, noise;
};

Result<Pools> make_pools(const EvalCommand& o, const Opened& opened) {
  const int threads = opened.pool->threads();
  if (o.jobs > threads) {
    return fail(Code::kInvalidArgument, "--jobs {} share {} threads; give each at least one (-t)", o.jobs, threads);
  }
  Pools pools;
  for (int i = 0; i < o.jobs; ++i) {
    const int own = threads / o.jobs;
    pools.jobs.push_back(std::make_unique<ThreadPool>(own));
    pools.noise.push_back(std::make_unique<ThreadPool>(own > 1 ? 1 : 2));
  }
  return pools;
}

Result<EvalEngine> make_engine(const EvalCommand& o, const Opened& opened, const Pools& pools) {
  EvalEngine engine;
  engine.context = opened.context;
  engine.jobs = o.jobs;
  if (opened.card) engine.card = reader_name(opened);
  engine.noise_label = opened.card ? "full@CPU reads" : fmt::format("full@threads={}", pools.noise.front()->threads());
  engine.session = [&opened, &pools](int64_t context, bool noise, int job) {
    SessionOptions s;
    s.context = context;
    s.products = opened.products;
    s.chunk = opened.chunk;
    s.order = opened.order;
    if (!noise) s.card = opened.card;
    s.card_kv = opened.card_kv;
    s.card_decodes = opened.card_decodes;
    s.card_chunk = opened.card_chunk;
    return Session::create(opened.model, s, *(noise && !opened.card ? pools.noise : pools.jobs)[size_t(job)]);
  };
  engine.bytes = [&opened](const Recipe& recipe, int64_t context) -> Result<int64_t> {
    LONGKV_ASSIGN(const KvPlan plan,
                  plan_for(*opened.model, recipe, context, opened.chunk, opened.pool->threads(), {}));
    return recipe == Recipe{} ? plan.peak_bytes : plan.k_bytes + plan.v_bytes + plan.index_bytes;
  };
  int64_t ram = 0;
  if (!o.ram.empty()) {
    LONGKV_ASSIGN(ram, parse_size(o.ram, "--ram"));
    if (ram == 0) return fail(Code::kInvalidArgument, "--ram {} must be above 0", o.ram);
  }
  engine.available_bytes = [ram] { return ram > 0 ? ram : available_ram_bytes(); };
  return engine;
}

// A recipe that the model cannot have is found before the first prompt is read.
Status try_recipes(const EvalEngine& engine, const EvalOptions& options) {
  LONGKV_ASSIGN(const auto session, engine.session(std::min<int64_t>(engine.context, 8192), true, 0));
  for (const EvalRecipe& r : options.recipes) {
    if (const auto side = session->make_kv(r.recipe); !side.ok()) return side.status().with_context(r.label);
  }
  return {};
}

Status list_tasks() {
  std::string text = "groups: niah, ruler, story, all\n";
  for (const EvalTask& t : eval_tasks()) text += fmt::format("{:<16} {}\n", t.name, t.about);
  return print(text);
}

// summary.csv, report.html, and every plot of one panel as a file of its own.
Status write_report(const std::string& dir, const EvalStore& store, const Summary& summary) {
  LONGKV_TRY(write_whole(dir + "/summary.csv", summary_csv(summary)));
  LONGKV_TRY(write_whole(dir + "/report.html", report_html(store.info(), store.records(), summary)));
  std::error_code error;
  std::filesystem::create_directories(dir + "/plots", error);
  if (error) return fail(Code::kIo, "cannot create the folder '{}/plots': {}", dir, error.message());
  const std::vector<ReportPlot> plots = report_plots(store.records(), summary);
  for (const ReportPlot& plot : plots) {
    const auto same = [&](const ReportPlot& p) { return p.name == plot.name; };
    if (std::count_if(plots.begin(), plots.end(), same) > 1 || plot.name.find('/') != std::string::npos) continue;
    LONGKV_TRY(write_whole(fmt::format("{}/plots/{}.svg", dir, plot.name), plot.svg));
  }
  return {};
}

Status print_summary(const EvalCommand& o, const Summary& summary) {
  if (o.global.json) return print(json_text(summary_json(summary)));
  return print(summary_text(summary));
}

// Tables and plots of what is in the folder, without a model.
Status report_again(const EvalCommand& o) {
  LONGKV_ASSIGN(const EvalStore store, EvalStore::read(o.dir));
  const Summary summary = summarise(store.records());
  LONGKV_TRY(write_report(o.dir, store, summary));
  return print_summary(o, summary);
}

Status run_eval(const EvalCommand& o) {
  LONGKV_TRY(apply_global_options(o.global));
  if (o.list) return list_tasks();
  if (o.report_only) {
    if (o.dir.empty()) return fail(Code::kInvalidArgument, "-o names the folder of the results; give one");
    return report_again(o);
  }
  if (o.model.model.empty()) return fail(Code::kInvalidArgument, "-m names the model file; give one");
  if (o.dir.empty() && o.prompts.empty())
    return fail(Code::kInvalidArgument, "-o names the folder of the results; give one");
  LONGKV_ASSIGN(EvalOptions options, parse_options(o));
  Haystack haystack = Haystack::grammar();
  if (o.haystack != "grammar") {
    LONGKV_ASSIGN(haystack, Haystack::open(o.haystack));
  }
  options.haystack = &haystack;
  std::vector<DatasetFile> files;
  LONGKV_ASSIGN(const auto data_tasks, add_data(o, options, files));
  ModelOptions model = o.model;
  model.can_use_card = model.card_reads = true;
  LONGKV_ASSIGN(Opened opened, open_model(model, /*must_fit=*/false));
  if (opened.recipe != Recipe{}) {
    return fail(Code::kInvalidArgument,
                "eval compares with full attention in f16; give types and recipes with --kv (quest+q8)");
  }
  // Sessions take what a length needs; what they may take at most is what was asked for or trained.
  opened.context = opened.asked_context > 0 ? opened.asked_context : opened.model->config().context;
  LONGKV_TRY(choose_form(o, opened, options));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  if (options.form == PromptForm::kNeedle10m && !o.chat_template.empty()) {
    return fail(Code::kInvalidArgument,
                "needle-10m-128k is asked in the forms that it was trained on, without a chat template; leave "
                "--chat-template out, or choose --form plain");
  }
  PromptOptions prompt;
  prompt.raw = o.raw || options.form == PromptForm::kNeedle10m;
  prompt.chat_template = o.chat_template;
  LONGKV_ASSIGN(const auto chat, choose_chat(prompt, *opened.model, tokenizer));
  const PromptMaker maker(tokenizer, chat);
  if (!o.prompts.empty()) {
    for (const int64_t length : options.lengths) {
      if (length > opened.context && !options.tasks.empty()) {
        return fail(Code::kInvalidArgument, "--lengths {} is beyond the context of {}", length, opened.context);
      }
    }
    LONGKV_ASSIGN(AtomicFile file, AtomicFile::create(o.prompts));
    LONGKV_TRY(write_prompts(options, maker, [&](const std::string& line) {
      return file.write({reinterpret_cast<const uint8_t*>(line.data()), line.size()});
    }));
    return file.commit();
  }
  LONGKV_ASSIGN(const Pools pools, make_pools(o, opened));
  LONGKV_ASSIGN(const EvalEngine engine, make_engine(o, opened, pools));
  for (const EvalRecipe& r : options.recipes) LONGKV_TRY(note_misfits(r.recipe, *opened.model));
  LONGKV_TRY(try_recipes(engine, options));
  LONGKV_ASSIGN(const EvalRunInfo info, describe_run(o, opened, options, maker, files));
  LONGKV_ASSIGN(EvalStore store, EvalStore::open(o.dir, info));

  const std::atomic<bool>* cancel = install_interrupt_flag();
  log_info(
      "{}: {} tasks, {} lengths, {} samples, full attention and {} recipes; question {} until the document was read; "
      "{} results are there",
      opened.model->config().name, options.tasks.size(), options.lengths.size(), options.samples,
      options.recipes.size(), options.play.question_seen ? "seen" : "hidden", store.records().size());
  Status ran = run_evaluation(options, maker, engine, store, show_progress(), cancel);
  // What is there is shown also when the run was stopped.
  const Summary summary = summarise(store.records());
  const Status written = write_report(o.dir, store, summary);
  if (!ran.ok()) {
    if (ran.code() == Code::kCancelled) {
      return fail(Code::kCancelled, "interrupted with {} results in '{}'; the same command goes on from there",
                  store.records().size(), o.dir);
    }
    return ran;
  }
  LONGKV_TRY(written);
  LONGKV_TRY(print_summary(o, summary));
  const auto& records = store.records();
  const bool answered = std::any_of(records.begin(), records.end(), [](const auto& r) { return r.skipped.empty(); });
  if (answered || records.empty()) return {};
  return fail(Code::kUnsupported, "nothing was answered, {} results were skipped: {}", records.size(),
              records.front().skipped);
}

}  // namespace

void add_eval(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<EvalCommand>();
  CLI::App* command =
      app.add_subcommand("eval", "Tasks over long prompts under many KV recipes: answers, speed, report");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/false);
  command->get_option("--model")->required(false);  // not for --list-tasks
  command->add_option("--tasks", o->tasks, "Tasks and groups, comma separated; see --list-tasks")
      ->capture_default_str();
  command
      ->add_option("--data", o->data,
                   "A benchmark's own files, as PATH or KIND:PATH (docs/evaluation.md); may be repeated")
      ->allow_extra_args(false);
  command->add_option("--data-tasks", o->data_tasks, "Only these tasks of --data, comma separated")->group(kMore);
  command
      ->add_option(
          "--jieba", o->jieba,
          "Folder of the Python package jieba, by whose words LongBench compares Chinese; default: where it is "
          "installed")
      ->group(kMore);
  command->add_flag("--report", o->report_only, "Only write tables and plots of the results in -o anew, then exit");
  command->add_flag("--list-tasks", o->list, "Print the tasks, then exit");
  command->add_option("--kv", o->recipes, "KV recipes, comma separated; full attention always comes first")
      ->capture_default_str();
  command->add_option("--lengths", o->lengths, "Tokens of prompt and answer, comma separated (K, M allowed)")
      ->capture_default_str();
  command->add_option("--samples", o->samples, "Prompts of each task and length")
      ->check(CLI::Range(int64_t(1), int64_t(1) << 20))
      ->capture_default_str();
  command->add_option("-o,--output", o->dir,
                      "Folder of samples.jsonl, summary.csv, report.html; goes on where it stopped");
  command->add_option("--question", o->question, "hidden until the document was read, or seen by the recipe")
      ->check(CLI::IsMember({"hidden", "seen"}))
      ->capture_default_str();
  command->add_option("--seed", o->seed, "Of all prompts")
      ->check(CLI::Range(int64_t(0), std::numeric_limits<int64_t>::max()))
      ->capture_default_str()
      ->group(kMore);
  command->add_option("--depths", o->depths, "Places of single facts, in percent of the document")
      ->capture_default_str()
      ->group(kMore);
  command->add_option("--haystack", o->haystack, "grammar (generated), a text file (also .gz), or a folder of *.txt")
      ->capture_default_str();
  command->add_option("--form", o->form, "Wording: auto, plain, needle-10m")
      ->check(CLI::IsMember({"auto", "plain", "needle-10m"}))
      ->capture_default_str()
      ->group(kMore);
  command->add_option("--chat-template", o->chat_template, "chatml, llama3, mistral, gemma, phi3, or Jinja")
      ->group(kMore);
  command->add_flag("--raw", o->raw, "No chat format around the prompts");
  command->add_option("--noise", o->noise, "Prompts of each cell that full attention answers again with other threads")
      ->check(CLI::Range(int64_t(0), int64_t(1) << 20))
      ->capture_default_str()
      ->group(kMore);
  command
      ->add_option("--kv-check", o->check_every,
                   "Every N-th token measures mass and error, the others are timed; 0: none")
      ->check(CLI::Range(0, 1 << 30))
      ->capture_default_str()
      ->group(kMore);
  command
      ->add_option(
          "--jobs", o->jobs,
          "Prompts at a time, which share the threads; the answers stay the same, times are of a shared machine")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--ram", o->ram, "Memory that prompts and recipes may take (K, M, G); default: what is free")
      ->group(kMore);
  command->add_option("--prompts", o->prompts, "Only write the prompts to this file, a line of JSON each, then exit")
      ->group(kMore);
  CLI::Option* tasks = command->get_option("--tasks");
  command->callback([o, tasks, &exit_code] {
    o->tasks_given = tasks->count() > 0;
    exit_code = report(run_eval(*o));
  });
}

}  // namespace longkv::cli
