// `longkv eval-kv`: one prompt under many KV recipes, what each loses against full attention and what it costs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "answer.h"
#include "base/error.h"
#include "base/log.h"
#include "card.h"
#include "commands.h"
#include "common.h"
#include "engine/compare_recipes.h"
#include "interrupt.h"
#include "output.h"
#include "planning.h"
#include "recipe_list.h"
#include "tokenizer/tokenizer.h"

namespace longkv::cli {

namespace {

// Tokens of the instruction that comes before a piece that is read again, and more.
constexpr int64_t kRepeatRoom = 64;

struct EvalKvOptions {
  GlobalOptions global;
  ModelOptions model;
  std::string file, question, recipes = "quest,ktransformers:budget=2048,q8,q4", output;  // empty: md
  int64_t steps = 64;
  int check_every = 4;
};

struct Texts {
  std::vector<int32_t> prompt;
  std::vector<int32_t> continuation;
};

// The document is the prompt and the question follows; without a question the document's last tokens do.
Result<Texts> read_texts(const EvalKvOptions& o, const Tokenizer& tokenizer) {
  LONGKV_ASSIGN(const std::string document, read_text_file(o.file));
  Texts texts;
  LONGKV_ASSIGN(texts.prompt, tokenizer.encode(document, /*add_special=*/true, /*parse_special=*/false));
  if (!o.question.empty()) {
    LONGKV_ASSIGN(texts.continuation, tokenizer.encode(o.question, /*add_special=*/false, /*parse_special=*/false));
    return texts;
  }
  if (int64_t(texts.prompt.size()) <= o.steps) {
    return fail(Code::kInvalidArgument,
                "'{}' has {} tokens; without -p the last {} of them are what is decoded, so more are needed", o.file,
                texts.prompt.size(), o.steps);
  }
  const auto split = texts.prompt.end() - o.steps;
  texts.continuation.assign(split, texts.prompt.end());
  texts.prompt.erase(split, texts.prompt.end());
  return texts;
}

nlohmann::ordered_json to_json(const RecipeReport& r) {
  nlohmann::ordered_json j;
  j["kv"] = r.kv;
  j["kv_label"] = r.label;
  j["kept_rows"] = r.kept_rows;
  j["kept_bytes"] = r.kept_bytes;
  j["index_bytes"] = r.index_bytes_held;
  j["bytes_per_token"] = r.bytes_per_token;
  j["captured_mass"] = r.captured_mass;
  j["output_error"] = r.output_error;
  j["kl_mean"] = r.kl_mean;
  j["kl_max"] = r.kl_max;
  j["same_top"] = r.same_top;
  j["perplexity"] = r.perplexity;
  j["tokens_per_second"] = r.seconds_per_token > 0 ? 1 / r.seconds_per_token : 0.0;
  return j;
}

std::string table(const std::vector<RecipeReport>& reports) {
  size_t width = 6;
  for (const RecipeReport& r : reports) width = std::max(width, r.label.size());
  std::string out = fmt::format(
      "| {:<{}} | kept rows | kept MiB | index MiB | read KiB/token |   mass | out error |  "
      "KL mean | same top |      ppl | tokens/s |\n|-{:-<{}}-|-{:->9}:|-{:->8}:|-{:->9}:|-{:->14}:|-{:->6}"
      ":|-{:->9}:|-{:->8}:|-{:->8}:|-{:->8}:|-{:->8}:|\n",
      "recipe", width, "", width, "", "", "", "", "", "", "", "", "", "");
  for (const RecipeReport& r : reports) {
    out += fmt::format(
        "| {:<{}} | {:9.0f} | {:8.2f} | {:9.2f} | {:14.1f} | {:6.4f} | {:9.4f} | {:8.5f} | {:7.1f}% | "
        "{:8.3f} | {:8.1f} |\n",
        r.label, width, r.kept_rows, double(r.kept_bytes) / 1048576, double(r.index_bytes_held) / 1048576,
        r.bytes_per_token / 1024, r.captured_mass, r.output_error, r.kl_mean, 100 * r.same_top, r.perplexity,
        r.seconds_per_token > 0 ? 1 / r.seconds_per_token : 0.0);
  }
  return out;
}

std::string csv(const std::vector<RecipeReport>& reports) {
  std::string out;
  for (const RecipeReport& r : reports) {
    const nlohmann::ordered_json j = to_json(r);
    std::string head, line;
    for (const auto& [key, value] : j.items()) {
      head += (head.empty() ? "" : ",") + key;
      line += (line.empty() ? "" : ",") + value.dump();
    }
    if (out.empty()) out = head + "\n";
    out += line + "\n";
  }
  return out;
}

// All recipes hold their rows of the prompt at the same time.
Status check_memory(const Opened& opened, const std::vector<Recipe>& recipes, int64_t context) {
  LONGKV_ASSIGN(KvPlan sum, plan_for(*opened.model, opened.recipe, context, opened.chunk, opened.pool->threads(), {}));
  for (const Recipe& recipe : recipes) {
    LONGKV_ASSIGN(const KvPlan plan,
                  plan_for(*opened.model, recipe, context, opened.chunk, opened.pool->threads(), {}));
    sum.peak_bytes += plan.k_bytes + plan.v_bytes + plan.index_bytes;
  }
  if (sum.fits()) return {};
  return fail(Code::kOutOfMemory, "{} recipes over {} tokens need {} together, {} are available; compare fewer at once",
              recipes.size() + 1, context, format_bytes(sum.peak_bytes), format_bytes(sum.machine.ram_bytes));
}

Status run_eval_kv(const EvalKvOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  if (o.steps < 1) return fail(Code::kInvalidArgument, "-n {} must be positive", o.steps);
  if (o.global.json && !o.output.empty() && o.output != "json")
    return fail(Code::kInvalidArgument, "--json and -o {} contradict each other", o.output);
  std::vector<Recipe> recipes;
  for (const std::string& text : split_recipes(o.recipes)) {
    LONGKV_ASSIGN(Recipe recipe, load_recipe(text));
    for (const std::string& note : recipe.notes) LONGKV_TRY(notice(recipe.name + ": " + note));
    recipes.push_back(std::move(recipe));
  }
  LONGKV_ASSIGN(Opened opened, open_model(o.model));
  for (const Recipe& recipe : recipes) LONGKV_TRY(note_misfits(recipe, *opened.model));
  if (opened.recipe != Recipe{}) {
    return fail(Code::kInvalidArgument,
                "eval-kv compares with full attention in f16; give types and recipes with --kv (quest+q8)");
  }
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  LONGKV_ASSIGN(const Texts texts, read_texts(o, tokenizer));
  CompareOptions compare;
  compare.continuation = texts.continuation;
  compare.steps = std::max(o.steps, int64_t(texts.continuation.size()));
  compare.check_every = o.check_every;
  int64_t needed = int64_t(texts.prompt.size()) + compare.steps;
  // KVzip reads the prompt again in pieces, behind the whole of it.
  for (const Recipe& recipe : recipes) {
    if (recipe.keep.kind == KeepKind::kKvzip) {
      needed = std::max(needed, int64_t(texts.prompt.size()) + recipe.keep.chunk + kRepeatRoom);
    }
  }
  if (needed > opened.context) {
    return fail(Code::kInvalidArgument, "{} tokens of prompt and {} steps do not fit the context of {}; raise -c",
                texts.prompt.size(), compare.steps, opened.context);
  }
  opened.context = needed;
  LONGKV_TRY(check_memory(opened, recipes, needed));
  log_info("{}: {} tokens read once, {} decoded under {} recipes, {} threads", opened.model->config().name,
           texts.prompt.size(), compare.steps, recipes.size() + 1, opened.pool->threads());
  LONGKV_ASSIGN(const auto session, make_session(opened));
  const std::atomic<bool>* cancel = install_interrupt_flag();
  LONGKV_ASSIGN(const std::vector<RecipeReport> reports,
                compare_recipes(*session, recipes, texts.prompt, compare, progress_line(), cancel));
  if (o.global.json || o.output == "json") {
    nlohmann::ordered_json j;
    j["model"] = o.model.model;
    j["prompt_tokens"] = texts.prompt.size();
    j["steps"] = compare.steps;
    j["threads"] = opened.pool->threads();
    for (const RecipeReport& r : reports) j["recipes"].push_back(to_json(r));
    return print(json_text(j));
  }
  return print(o.output == "csv" ? csv(reports) : table(reports));
}

}  // namespace

void add_eval_kv(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<EvalKvOptions>();
  CLI::App* command = app.add_subcommand("eval-kv", "One prompt under many KV recipes: what each loses and costs");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/false);
  hide_card_options(*command);
  command->add_option("-f,--file", o->file, "Document: the prompt ('-' = standard input)")->required();
  command->add_option("-p,--prompt", o->question,
                      "Question, decoded after the document; without it the document's last -n tokens are");
  command->add_option("-n,--predict", o->steps, "Tokens to decode")->capture_default_str();
  command->add_option("--kv", o->recipes, "KV recipes, comma separated")->capture_default_str();
  command->add_option("--kv-check", o->check_every, "Every N-th step measures mass and error, the others are timed")
      ->check(CLI::Range(2, 1 << 30))
      ->capture_default_str();
  command->add_option("-o,--output", o->output, "md, csv or json")
      ->check(CLI::IsMember({"md", "csv", "json"}))
      ->default_str("md");
  command->callback([o, &exit_code] { exit_code = report(run_eval_kv(*o)); });
}

}  // namespace longkv::cli
