#include "eval/runner.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/seconds.h"
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

// Sessions of one of the prompts that are played at the same time.
struct Job {
  int index = 0;
  std::unique_ptr<Session> session, noise;
  std::unique_ptr<PromptPlayer> player;  // of `session`
};

// Length by length; within one, the first samples of all tasks come before the second ones.
std::vector<Item> list_items(const EvalOptions& options) {
  std::vector<Item> items;
  for (const int64_t length : options.lengths) {
    for (int64_t index = 0; index < options.samples; ++index) {
      for (const EvalTask* task : options.tasks) {
        Item item;
        item.task = task;
        item.id.root = options.seed;
        item.id.task = task->name;
        item.id.version = task->version;
        item.id.length = length;
        item.id.index = index;
        if (task->has_depth) item.id.depth = depth_of(options.depths, index);
        items.push_back(std::move(item));
      }
    }
  }
  for (const EvalSample& sample : options.given) {
    Item item;
    item.given = &sample;
    item.id = sample.id;
    items.push_back(std::move(item));
  }
  return items;
}

// A prompt that cannot be made has no tokens, and its reason is in `refused`.
Result<EvalPrompt> make_prompt(const EvalOptions& options, const PromptMaker& maker, const Item& item,
                               std::string& refused) {
  TaskRequest request;
  request.id = item.id;
  request.form = options.form;
  request.haystack = options.haystack;
  Result<EvalPrompt> prompt = item.given != nullptr ? maker.encode(*item.given) : maker.fit(*item.task, request);
  if (prompt.ok() || prompt.status().code() != Code::kInvalidArgument) return prompt;
  refused = prompt.status().message();
  return EvalPrompt{};
}

class Runner {
 public:
  Runner(const EvalOptions& options, const PromptMaker& maker, const EvalEngine& engine, EvalStore& store,
         const std::atomic<bool>* cancel)
      : options_(options), maker_(maker), engine_(engine), store_(store), cancel_(cancel) {}

  Status run(const std::function<void(const EvalProgress&)>& report) {
    items_ = list_items(options_);
    report_ = &report;
    progress_.prompts_total = int64_t(items_.size());
    begin_ = Clock::now();
    available_ = engine_.available_bytes();
    std::vector<std::thread> threads;
    for (int i = 1; i < engine_.jobs; ++i) threads.emplace_back([this, i] { work(i); });
    work(0);
    for (std::thread& t : threads) t.join();
    LONGKV_TRY(status_);
    tell("");
    return {};
  }

 private:
  // Takes one item after the other until none is left or one fails.
  void work(int index) {
    Job job;
    job.index = index;
    while (true) {
      const Item* item = nullptr;
      {
        const std::lock_guard lock(mutex_);
        if (status_.ok() && cancel_ != nullptr && cancel_->load()) status_ = fail(Code::kCancelled, "interrupted");
        if (!status_.ok() || next_ == items_.size()) break;
        item = &items_[next_++];
        tell(fmt::format("{} {} #{}", item->id.task, item->id.length, item->id.index));
      }
      const Result<bool> known = run_item(*item, job);
      const std::lock_guard lock(mutex_);
      if (known.ok()) {
        ++progress_.prompts;
        progress_.known += *known;
      } else if (status_.ok()) {
        status_ = known.status();
      }
    }
    const std::lock_guard lock(sessions_);
    job = {};
  }

  void tell(const std::string& now) {
    progress_.now = now;
    progress_.seconds = seconds_since(begin_);
    if (*report_) (*report_)(progress_);
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
    r.jobs = engine_.jobs;
    return r;
  }

  bool has(const EvalRecord& record) {
    const std::lock_guard lock(mutex_);
    return store_.has(record.key());
  }
  Status add(const EvalRecord& record) {
    const std::lock_guard lock(mutex_);
    LONGKV_TRY(status_);
    return store_.append(record);
  }

  // Whether nothing had to be computed.
  Result<bool> run_item(const Item& item, Job& job) {
    const std::string full = Recipe{}.canonical();
    const auto known = [&](const std::string& kv) { return has(blank(item, kv, "")); };
    std::vector<size_t> missing;
    for (size_t i = 0; i < options_.recipes.size(); ++i) {
      if (!known(options_.recipes[i].recipe.canonical())) missing.push_back(i);
    }
    const bool wants_noise = item.id.index < options_.noise && !known(engine_.noise_label);
    const bool wants_full = !known(full);
    if (missing.empty() && !wants_noise && !wants_full) return true;

    std::string refused;
    EvalPrompt prompt;
    if (item.task != nullptr && item.id.length > engine_.context) {
      // Not even made: a length may be larger than memory.
      refused = fmt::format("{} tokens do not fit the context of {}", item.id.length, engine_.context);
    } else {
      LONGKV_ASSIGN(prompt, make_prompt(options_, maker_, item, refused));
    }
    const int64_t needed = prompt.tokens();
    if (prompt.ids.empty() || needed > engine_.context) {
      const std::string why =
          prompt.ids.empty() ? refused : fmt::format("{} tokens do not fit the context of {}", needed, engine_.context);
      const auto skip = [&](const std::string& kv, const std::string& label) {
        EvalRecord r = blank(item, kv, label);
        r.skipped = why;
        if (!prompt.ids.empty()) describe(prompt, r);
        return add(r);
      };
      if (wants_full) LONGKV_TRY(skip(full, "full"));
      for (const size_t i : missing) {
        LONGKV_TRY(skip(options_.recipes[i].recipe.canonical(), options_.recipes[i].label));
      }
      if (wants_noise) LONGKV_TRY(skip(engine_.noise_label, engine_.noise_label));
      return false;
    }
    const int64_t context = context_for(item, needed);
    if (!job.session || job.session->context() != context) LONGKV_TRY(open(job, context));
    LONGKV_ASSIGN(const auto groups, group(missing, context));
    bool full_written = !wants_full;
    for (const std::vector<size_t>& g : groups) {
      std::vector<Recipe> recipes;
      for (const size_t i : g) recipes.push_back(options_.recipes[i].recipe);
      LONGKV_TRY(job.player->play(prompt, recipes, {}, [&](int64_t i, const PlayedAnswer& answer) -> Status {
        if (i < 0 && std::exchange(full_written, true)) return {};
        const EvalRecipe* r = i < 0 ? nullptr : &options_.recipes[g[size_t(i)]];
        return append(item, prompt, r == nullptr ? full : r->recipe.canonical(), r == nullptr ? "full" : r->label,
                      r == nullptr ? Recipe{} : r->recipe, answer);
      }));
    }
    if (wants_noise) {
      if (!job.noise) {
        const std::lock_guard lock(sessions_);
        LONGKV_ASSIGN(job.noise, engine_.session(context, true, job.index));
      }
      PlayedAnswer answer;
      PromptPlayer player(*job.noise, maker_.tokenizer(), options_.play, cancel_);
      LONGKV_TRY(player.replay(prompt, job.player->script(), answer));
      LONGKV_TRY(append(item, prompt, engine_.noise_label, engine_.noise_label, Recipe{}, answer));
    }
    return false;
  }

  Status open(Job& job, int64_t context) {
    const std::lock_guard lock(sessions_);
    job.player.reset();
    job.session.reset();
    job.noise.reset();
    LONGKV_ASSIGN(job.session, engine_.session(context, false, job.index));
    job.player = std::make_unique<PromptPlayer>(*job.session, maker_.tokenizer(), options_.play, cancel_);
    return {};
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
    // Of several jobs each has its share of what was free before they began.
    const int64_t room = (engine_.jobs > 1 ? available_ / engine_.jobs : engine_.available_bytes()) - full;
    if (room < 0) {
      return fail(Code::kOutOfMemory,
                  "full attention over {} tokens needs {} MiB, {} MiB are available for each of {} prompts at a time",
                  context, full >> 20, (full + room) >> 20, engine_.jobs);
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
    if (groups.size() > 1 && !told_groups_.exchange(true)) {
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
                    : score_answer(s.metric, a.text, s.references, s.distractors, s.words.get());
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
    // Four digits show all there is to see, and there are hundreds.
    for (const double mass : a.head_mass) r.head_mass.push_back(std::round(mass * 1e4) / 1e4);
    r.read_on = a.read_on_card ? engine_.card : "CPU";
    r.shared_prefill = a.shared_prefill;
    r.prefill_seconds = a.prefill_seconds;
    r.seconds_per_token = a.seconds_per_token;
    r.kept_rows = a.kept_rows;
    r.kept_bytes = a.kept_bytes;
    r.index_bytes = a.index_bytes;
    r.rows_attended = a.rows_attended;
    r.bytes_per_token = a.bytes_per_token;
    return add(r);
  }

  const EvalOptions& options_;
  const PromptMaker& maker_;
  const EvalEngine& engine_;
  EvalStore& store_;
  const std::atomic<bool>* cancel_;
  std::vector<Item> items_;
  Clock::time_point begin_;
  int64_t available_ = 0;
  std::atomic<bool> told_groups_ = false;
  std::mutex sessions_;  // while sessions are made and ended
  std::mutex mutex_;     // of the store and what follows
  const std::function<void(const EvalProgress&)>* report_ = nullptr;
  EvalProgress progress_;
  size_t next_ = 0;
  Status status_;  // of the job that failed first
};

}  // namespace

Status run_evaluation(const EvalOptions& options, const PromptMaker& maker, const EvalEngine& engine, EvalStore& store,
                      const std::function<void(const EvalProgress&)>& report, const std::atomic<bool>* cancel) {
  return Runner(options, maker, engine, store, cancel).run(report);
}

Status write_prompts(const EvalOptions& options, const PromptMaker& maker,
                     const std::function<Status(const std::string& line)>& sink) {
  for (const Item& item : list_items(options)) {
    std::string refused;
    LONGKV_ASSIGN(const EvalPrompt prompt, make_prompt(options, maker, item, refused));
    nlohmann::ordered_json j;
    j["suite"] = item.given != nullptr ? item.given->suite : "longkv";
    j["task"] = item.id.task;
    j["length"] = item.id.length;
    j["depth"] = item.id.depth;
    j["index"] = item.id.index;
    if (prompt.ids.empty()) {
      j["skipped"] = refused;
    } else {
      j["metric"] = eval_metric_name(prompt.sample.metric);
      j["references"] = prompt.sample.references;
      j["stop"] = prompt.sample.stop;
      j["new_tokens"] = prompt.new_tokens;
      j["prompt_hash"] = prompt.hash();
      j["document_tokens"] = prompt.document;
      j["ids"] = prompt.ids;
      if (!prompt.continuation.empty()) j["continuation"] = prompt.continuation;
    }
    LONGKV_TRY(sink(j.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n"));
  }
  return {};
}

}  // namespace longkv
