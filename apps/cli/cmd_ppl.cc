// `longkv ppl`: perplexity by llama-perplexity's windows and scoring rule, and divergence from a recorded run.
#include <fmt/format.h>

#include <memory>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "commands.h"
#include "common.h"
#include "engine/likelihood.h"
#include "engine/logits_file.h"
#include "interrupt.h"
#include "output.h"
#include "tokenizer/tokenizer.h"

namespace longkv::cli {

namespace {

struct PplOptions {
  GlobalOptions global;
  ModelOptions model;
  std::string file;
  std::string base_file;
  bool compare = false;
  int64_t windows = -1;
};

// Scores of one run, and where they go.
struct Scores {
  PerplexityMeter perplexity;
  std::optional<DivergenceMeter> divergence;
  std::optional<LogitsWriter> writer;
  const LogitsReader* base = nullptr;
  std::vector<float> base_row;
  int64_t row = 0;

  Status add(const float* logits, int64_t vocab, int32_t next) {
    perplexity.add(negative_log_likelihood(logits, vocab, next));
    if (writer) LONGKV_TRY(writer->append(logits));
    if (base != nullptr) {
      base->log_probabilities(row, base_row.data());
      divergence->add(base_row.data(), logits, vocab, next);
    }
    ++row;
    return {};
  }
};

Result<int64_t> windows_to_score(const PplOptions& o, int64_t available) {
  if (o.windows <= available) return o.windows > 0 ? o.windows : available;
  LONGKV_TRY(notice(fmt::format("--chunks {}: there are only {} windows", o.windows, available)));
  return available;
}

// Tokens of all windows; the first of each is BOS where the tokenizer adds one.
Result<std::vector<int32_t>> window_tokens(const PplOptions& o, const Tokenizer& tokenizer, int64_t window) {
  LONGKV_ASSIGN(const std::string text, read_text_file(o.file));
  LONGKV_ASSIGN(std::vector<int32_t> ids, tokenizer.encode(text, /*add_special=*/true, /*parse_special=*/false));
  int64_t windows = int64_t(ids.size()) / window;
  if (windows < 1) {
    return fail(Code::kInvalidArgument, "'{}' has {} tokens; one window needs {} (choose a smaller -c)", o.file,
                ids.size(), window);
  }
  LONGKV_ASSIGN(windows, windows_to_score(o, windows));
  ids.resize(size_t(windows * window));
  if (tokenizer.adds_bos() && tokenizer.bos()) {
    for (int64_t w = 0; w < windows; ++w) ids[size_t(w * window)] = *tokenizer.bos();
  }
  return ids;
}

// Whether a prompt attends what decoding would: no rows are chosen, dropped or encoded when it ends.
bool reads_as_it_decodes(const Recipe& recipe) {
  return recipe.select.all && !recipe.keep.evicts() && !store_regions(recipe.store, recipe.mask).on;
}

// The window in one prompt where that shows the recipe. Others act on decoding, so there the scored half is fed token
// by token; that is what the recipe's user gets.
Status score_window(Session& session, std::span<const int32_t> ids, int64_t vocab, const std::atomic<bool>* cancel,
                    Scores& scores) {
  const int64_t n = int64_t(ids.size());
  const int64_t first = n / 2;
  LONGKV_TRY(session.truncate(0));
  if (reads_as_it_decodes(session.kv().recipe())) {
    Status failed;
    LONGKV_TRY(session.prefill(
        ids, {}, cancel,
        [&](int64_t begin, int64_t count, const float* logits) {
          for (int64_t i = 0; i < count && begin + i < n - 1 && failed.ok(); ++i) {
            failed = scores.add(logits + i * vocab, vocab, ids[size_t(begin + i + 1)]);
          }
        },
        first));
    return failed;
  }
  LONGKV_TRY(session.prefill(ids.subspan(0, size_t(first)), {}, cancel));
  for (int64_t t = first; t < n - 1; ++t) {
    if (cancel->load()) return fail(Code::kCancelled, "interrupted");
    LONGKV_TRY(session.decode(ids[size_t(t)]));
    LONGKV_TRY(scores.add(session.logits().data(), vocab, ids[size_t(t + 1)]));
  }
  return {};
}

Status print_results(const PplOptions& o, const Opened& opened, const Scores& s, int64_t window, int64_t windows) {
  nlohmann::ordered_json j;
  j["model"] = o.model.model;
  j["kv"] = opened.recipe.canonical();
  j["n_ctx"] = window;
  j["n_chunks"] = windows;
  j["tokens_scored"] = s.perplexity.count();
  j["perplexity"] = s.perplexity.perplexity();
  j["perplexity_stderr"] = s.perplexity.standard_error();
  if (s.divergence) {
    const DivergenceMeter& d = *s.divergence;
    j["base_perplexity"] = d.base_perplexity();
    j["kl_mean"] = d.kl().mean;
    j["kl_mean_stderr"] = d.kl().standard_error;
    j["kl_median"] = d.kl_percentile(0.5);
    j["kl_p90"] = d.kl_percentile(0.9);
    j["kl_p99"] = d.kl_percentile(0.99);
    j["kl_p999"] = d.kl_percentile(0.999);
    j["kl_max"] = d.kl_max();
    j["rms_delta_p"] = d.rms_probability_difference();
    j["same_top"] = d.same_top();
  }
  if (o.global.json) {
    return print(json_text(j));
  }
  std::string text =
      fmt::format("perplexity {:.4f} +/- {:.5f} ({} windows of {} tokens, {} scored)\n", s.perplexity.perplexity(),
                  s.perplexity.standard_error(), windows, window, s.perplexity.count());
  if (s.divergence) {
    const DivergenceMeter& d = *s.divergence;
    text += fmt::format("base perplexity {:.4f}\n", d.base_perplexity());
    text += fmt::format(
        "KL divergence: mean {:.6f} +/- {:.6f}, median {:.6f}, 90% {:.6f}, 99% {:.6f}, 99.9% {:.6f}, maximum {:.6f}\n",
        d.kl().mean, d.kl().standard_error, d.kl_percentile(0.5), d.kl_percentile(0.9), d.kl_percentile(0.99),
        d.kl_percentile(0.999), d.kl_max());
    text += fmt::format("RMS difference of probabilities {:.4f} %, same top token {:.3f} %\n",
                        100 * d.rms_probability_difference(), 100 * d.same_top());
  }
  return print(text);
}

// The recorded windows decide; another -c would not be obeyed.
Status check_context(const PplOptions& o, const LogitsReader& base) {
  if (o.model.context.empty()) return {};
  LONGKV_ASSIGN(const int64_t context, parse_size(o.model.context, "--ctx-size"));
  if (context == base.window()) return {};
  return fail(Code::kInvalidArgument, "-c {} contradicts '{}', which was recorded with windows of {} tokens", context,
              o.base_file, base.window());
}

Status run_ppl(const PplOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  if (o.compare && o.base_file.empty()) {
    return fail(Code::kInvalidArgument, "--kl-divergence needs --kl-divergence-base FILE, the run to compare with");
  }
  if (o.windows < 1 && o.windows != -1)
    return fail(Code::kInvalidArgument, "--chunks {} must be positive, or -1 for all", o.windows);
  ModelOptions m = o.model;
  std::optional<LogitsReader> base;
  if (o.compare) {
    LONGKV_ASSIGN(base, LogitsReader::open(o.base_file));
    if (!o.file.empty()) LONGKV_TRY(notice("-f is ignored: --kl-divergence scores the text of the recorded run"));
    LONGKV_TRY(check_context(o, *base));
    m.context = std::to_string(base->window());
  } else if (m.context.empty()) {
    m.context = "512";
  }
  m.can_use_card = m.can_use_disk = true;
  LONGKV_ASSIGN(const Opened opened, open_model(m));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  const int64_t vocab = opened.model->config().vocab;

  Scores scores;
  std::vector<int32_t> ids;
  const int64_t window = opened.context;
  if (o.compare) {
    if (base->vocab() != vocab) {
      return fail(Code::kInvalidArgument, "'{}' was recorded with a vocabulary of {}, the model has {}", o.base_file,
                  base->vocab(), vocab);
    }
    ids.assign(base->tokens().begin(), base->tokens().end());
    LONGKV_ASSIGN(const int64_t windows, windows_to_score(o, base->windows()));
    ids.resize(size_t(windows * window));
    for (int32_t id : ids) {
      if (id < 0 || id >= vocab)
        return fail(Code::kCorrupt, "'{}' holds token {}, outside the vocabulary", o.base_file, id);
    }
    scores.base = &*base;
    scores.divergence.emplace();
    scores.base_row.resize(size_t(vocab));
  } else {
    if (window < 4) return fail(Code::kInvalidArgument, "a window of {} tokens is too short; at least 4", window);
    LONGKV_ASSIGN(ids, window_tokens(o, tokenizer, window));
    if (!o.base_file.empty()) {
      LONGKV_ASSIGN(scores.writer, LogitsWriter::create(o.base_file, window, vocab, ids));
    }
  }
  log_info("scoring {}: {}",
           reads_as_it_decodes(opened.recipe) ? "every window as one prompt" : "token by token under the recipe",
           opened.recipe.canonical());
  LONGKV_ASSIGN(const auto session, make_session(opened));
  const std::atomic<bool>* cancel = install_interrupt_flag();
  const int64_t windows = int64_t(ids.size()) / window;
  for (int64_t w = 0; w < windows; ++w) {
    LONGKV_TRY(score_window(*session, std::span<const int32_t>(ids).subspan(size_t(w * window), size_t(window)), vocab,
                            cancel, scores));
    log_info("[{}/{}] perplexity {:.4f}", w + 1, windows, scores.perplexity.perplexity());
  }
  if (scores.writer) LONGKV_TRY(scores.writer->commit());
  return print_results(o, opened, scores, window, windows);
}

}  // namespace

void add_ppl(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<PplOptions>();
  CLI::App* command = app.add_subcommand("ppl", "Perplexity of a text, and KL divergence from a recorded run");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/true);
  command->add_option("-f,--file", o->file, "Text file");
  command->add_option("--chunks", o->windows, "Windows to score; default: all");
  command->add_option("--kl-divergence-base", o->base_file, "File of logits: written, or with --kl-divergence read");
  command->add_flag("--kl-divergence", o->compare, "Compare with the run in --kl-divergence-base (its text is used)");
  command->callback([o, &exit_code] {
    if (o->file.empty() && !o->compare) {
      exit_code = report(Status(Code::kInvalidArgument, "-f FILE is needed: the text to score"));
      return;
    }
    exit_code = report(run_ppl(*o));
  });
}

}  // namespace longkv::cli
