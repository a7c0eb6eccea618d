#include "eval/runner.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/log.h"
#include "eval/scorers.h"

namespace longkv {

namespace {

using Clock = std::chrono::steady_clock;

// Tokens of the instruction before a piece that a recipe reads again (kvzip), and more.
constexpr int64_t kRepeatRoom = 64;
// Contexts of data set prompts are rounded up to this, so that a session serves many.
constexpr int64_t kContextStep = 8192;

struct Item {
  SampleId id;
  const EvalTask* task = nullptr;     // generated, or
  const EvalSample* given = nullptr;  // of a data set
};

class Runner {
 public:
  Runner(const EvalOptions& options, const PromptMaker& maker, const EvalEngine& engine, EvalStore& store,
         const std::atomic<bool>* cancel)
      : options_(options), maker_(maker), engine_(engine), store_(store), cancel_(cancel) {}

  Status run(const std::function<void(const EvalProgress&)>& report) {
    const std::vector<Item> items = list();
    EvalProgress progress;
    progress.prompts_total = int64_t(items.size());
    const auto begin = Clock::now();
    for (const Item& item : items) {
      if (cancel_ != nullptr && cancel_->load()) return fail(Code::kCancelled, "interrupted");
      progress.now = fmt::format("{} {} #{}", item.id.task, item.id.length, item.id.index);
      progress.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      if (report) report(progress);
      LONGKV_ASSIGN(const bool known, run_item(item));
      ++progress.prompts;
      progress.known += known;
    }
    progress.now.clear();
    progress.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (report) report(progress);
    return {};
  }

 private:
  // Length by length; within one, the first samples of all tasks come before the second ones.
  std::vector<Item> list() const {
    std::vector<Item> items;
    for (const int64_t length : options_.lengths) {
      for (int64_t index = 0; index < options_.samples; ++index) {
        for (const EvalTask* task : options_.tasks) {
          Item item;
          item.task = task;
          item.id.root = options_.seed;
          item.id.task = task->name;
          item.id.version = task->version;
          item.id.length = length;
          item.id.index = index;
          if (task->has_depth) item.id.depth = depth_of(options_.depths, index);
          items.push_back(std::move(item));
        }
      }
    }
    for (const EvalSample& sample : options_.given) {
      Item item;
      item.given = &sample;
      item.id = sample.id;
      items.push_back(std::move(item));
    }
    return items;
  }

  EvalRecord blank(const Item& item, const std::string& kv, const std::string& label) const {
    EvalRecord r;
    r.suite = item.given != nullptr ? item.given->suite : "longkv";
    r.task = item.id.task;
    r.version = item.id.version;
    r.length = item.id.length;
    r.depth = item.id.depth;
    r.index = item.id.index;
    r.seed = item.id.seed();
    r.kv = kv;
    r.label = label;
    r.question = options_.play.question_seen ? "seen" : "hidden";
    return r;
  }

  // Whether nothing had to be computed.
  Result<bool> run_item(const Item& item) {
    const std::string full = Recipe{}.canonical();
    const auto known = [&](const std::string& kv) { return store_.has(blank(item, kv, "").key()); };
    std::vector<size_t> missing;
    for (size_t i = 0; i < options_.recipes.size(); ++i) {
      if (!known(options_.recipes[i].recipe.canonical())) missing.push_back(i);
    }
    const bool wants_noise = item.id.index < options_.noise && !known(engine_.noise_label);
    const bool wants_full = !known(full);
    if (missing.empty() && !wants_noise && !wants_full) return true;

    LONGKV_ASSIGN(const EvalPrompt prompt, make_prompt(item));
    const int64_t needed = prompt.tokens();
    if (prompt.ids.empty() || needed > engine_.context) {
      const std::string why = prompt.ids.empty()
                                  ? refused_
                                  : fmt::format("{} tokens do not fit the context of {}", needed, engine_.context);
      const auto skip = [&](const std::string& kv, const std::string& label) {
        EvalRecord r = blank(item, kv, label);
        r.skipped = why;
        if (!prompt.ids.empty()) describe(prompt, r);
        return store_.append(r);
      };
      if (wants_full) LONGKV_TRY(skip(full, "full"));
      for (const size_t i : missing) {
        LONGKV_TRY(skip(options_.recipes[i].recipe.canonical(), options_.recipes[i].label));
      }
      if (wants_noise) LONGKV_TRY(skip(engine_.noise_label, engine_.noise_label));
      return false;
    }
    const int64_t context = context_for(item, needed);
    if (!session_ || session_->context() != context) {
      session_.reset();
      other_.reset();
      LONGKV_ASSIGN(session_, engine_.session(context, false));
    }
    LONGKV_ASSIGN(const auto groups, group(missing, context));
    bool full_written = !wants_full;
    for (const std::vector<size_t>& g : groups) {
      std::vector<Recipe> recipes;
      for (const size_t i : g) recipes.push_back(options_.recipes[i].recipe);
      PromptPlayer player(*session_, maker_.tokenizer(), options_.play, cancel_);
      LONGKV_TRY(player.play(prompt, recipes, {}, [&](int64_t i, const PlayedAnswer& answer) -> Status {
        if (i < 0 && std::exchange(full_written, true)) return {};
        const EvalRecipe* r = i < 0 ? nullptr : &options_.recipes[g[size_t(i)]];
        return append(item, prompt, r == nullptr ? full : r->recipe.canonical(), r == nullptr ? "full" : r->label,
                      r == nullptr ? Recipe{} : r->recipe, answer);
      }));
    }
    if (wants_noise) {
      if (!other_) {
        LONGKV_ASSIGN(other_, engine_.session(context, true));
      }
      PromptPlayer player(*other_, maker_.tokenizer(), options_.play, cancel_);
      LONGKV_TRY(player.play(prompt, {}, {}, [&](int64_t, const PlayedAnswer& answer) {
        return append(item, prompt, engine_.noise_label, engine_.noise_label, Recipe{}, answer);
      }));
    }
    return false;
  }

  // A prompt that cannot be made has no tokens, and its reason is in refused_.
  Result<EvalPrompt> make_prompt(const Item& item) {
    TaskRequest request;
    request.id = item.id;
    request.form = options_.form;
    request.haystack = options_.haystack;
    Result<EvalPrompt> prompt = item.given != nullptr ? maker_.encode(*item.given) : maker_.fit(*item.task, request);
    if (prompt.ok() || prompt.status().code() != Code::kInvalidArgument) return prompt;
    refused_ = prompt.status().message();
    return EvalPrompt{};
  }

  // Generated prompts of a length share a context, so that settings that depend on it are the same for all.
  int64_t context_for(const Item& item, int64_t needed) const {
    int64_t context = item.task != nullptr ? item.id.length : (needed + kContextStep - 1) / kContextStep * kContextStep;
    for (const EvalRecipe& r : options_.recipes) {
      if (r.recipe.keep.kind == KeepKind::kKvzip) {
        context =
            std::max(context, (item.task != nullptr ? item.id.length : needed) + r.recipe.keep.chunk + kRepeatRoom);
      }
    }
    return std::max(needed, std::min(context, engine_.context));
  }

  // Recipes that fit into memory beside full attention, as few readings of the prompt as possible.
  Result<std::vector<std::vector<size_t>>> group(const std::vector<size_t>& recipes, int64_t context) {
    std::vector<std::vector<size_t>> groups;
    LONGKV_ASSIGN(const int64_t full, engine_.bytes(Recipe{}, context));
    const int64_t room = engine_.available_bytes() - full;
    if (room < 0) {
      return fail(Code::kOutOfMemory, "full attention over {} tokens needs {} MiB, {} MiB are available", context,
                  full >> 20, (full + room) >> 20);
    }
    if (recipes.empty()) return std::vector<std::vector<size_t>>{{}};
    int64_t left = 0;
    for (const size_t i : recipes) {
      LONGKV_ASSIGN(const int64_t bytes, engine_.bytes(options_.recipes[i].recipe, context));
      if (bytes > room) {
        return fail(Code::kOutOfMemory, "{} over {} tokens needs {} MiB beside full attention, {} MiB are available",
                    options_.recipes[i].label, context, bytes >> 20, std::max<int64_t>(0, room) >> 20);
      }
      if (groups.empty() || bytes > left) {
        groups.emplace_back();
        left = room;
      }
      groups.back().push_back(i);
      left -= bytes;
    }
    if (groups.size() > 1 && !std::exchange(told_groups_, true)) {
      LONGKV_TRY(
          notice(fmt::format("memory holds the recipes in {} groups; each reads the prompts again", groups.size())));
    }
    return groups;
  }

  static void describe(const EvalPrompt& prompt, EvalRecord& r) {
    r.metric = eval_metric_name(prompt.sample.metric);
    r.references = prompt.sample.references;
    r.real_depth = prompt.depth;
    r.prompt_hash = prompt.hash();
    r.prompt_tokens = int64_t(prompt.ids.size());
    r.document_tokens = prompt.document;
    r.new_tokens = prompt.new_tokens;
    r.units = prompt.units;
  }

  Status append(const Item& item, const EvalPrompt& prompt, const std::string& kv, const std::string& label,
                const Recipe& recipe, const PlayedAnswer& a) {
    EvalRecord r = blank(item, kv, label);
    describe(prompt, r);
    r.sparse = sparse_phases(recipe, options_.play);
    r.skipped = a.skipped;
    if (a.skipped.empty()) {
      const EvalSample& s = prompt.sample;
      r.score = s.metric == EvalMetric::kNegativeLogLikelihood
                    ? a.nll
                    : score_answer(s.metric, a.text, s.references, s.distractors);
      r.candidates = named_candidates(a.text, s.references, s.distractors);
    }
    r.text = a.text;
    r.finish = a.finish;
    r.answer_hash = XXH64(a.ids.data(), a.ids.size() * sizeof(int32_t), 0);
    r.answer_tokens = int64_t(a.ids.size());
    r.compared = a.compared;
    r.checked = a.checked;
    r.kl_mean = a.kl_mean;
    r.kl_max = a.kl_max;
    r.same_top = a.same_top;
    r.kl_buckets = a.kl_buckets;
    r.captured_mass = a.captured_mass;
    r.output_error = a.output_error;
    r.layer_mass = a.layer_mass;
    r.shared_prefill = a.shared_prefill;
    r.prefill_seconds = a.prefill_seconds;
    r.seconds_per_token = a.seconds_per_token;
    r.kept_rows = a.kept_rows;
    r.kept_bytes = a.kept_bytes;
    r.index_bytes = a.index_bytes;
    r.rows_attended = a.rows_attended;
    r.bytes_per_token = a.bytes_per_token;
    return store_.append(r);
  }

  const EvalOptions& options_;
  const PromptMaker& maker_;
  const EvalEngine& engine_;
  EvalStore& store_;
  const std::atomic<bool>* cancel_;
  std::unique_ptr<Session> session_, other_;
  std::string refused_;
  bool told_groups_ = false;
};

}  // namespace

Status run_evaluation(const EvalOptions& options, const PromptMaker& maker, const EvalEngine& engine, EvalStore& store,
                      const std::function<void(const EvalProgress&)>& report, const std::atomic<bool>* cancel) {
  return Runner(options, maker, engine, store, cancel).run(report);
}

}  // namespace longkv
