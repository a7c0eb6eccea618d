// `longkv search-prefill`: writes the file that assigns a sparse prefill pattern to each head, from one prompt.
#include <fmt/format.h>

#include <memory>
#include <optional>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/log.h"
#include "card.h"
#include "commands.h"
#include "common.h"
#include "interrupt.h"
#include "output.h"
#include "prefill/assignment.h"
#include "prefill/search.h"
#include "tokenizer/tokenizer.h"

namespace longkv::cli {

namespace {

struct SearchOptions {
  GlobalOptions global;
  ModelOptions model;
  std::string file;
  std::string output;
  std::string budget = "4K";
  int64_t queries = 4096;
};

std::string pattern_text(const HeadPattern& p) {
  switch (p.kind) {
    case PrefillKind::kAShape: return fmt::format("a_shape({}, {})", p.first, p.second);
    case PrefillKind::kVerticalSlash: return fmt::format("vertical_slash({}, {})", p.first, p.second);
    case PrefillKind::kBlockSparse: return fmt::format("block_sparse({})", p.first);
    default: return "dense";
  }
}

Status search(const SearchOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_ASSIGN(const int64_t budget, parse_size(o.budget, "--budget"));
  if (budget < 1 || o.queries < 64) {
    return fail(Code::kInvalidArgument, "--budget {} and --queries {}; at least 1 and 64 are needed", budget,
                o.queries);
  }
  LONGKV_ASSIGN(AtomicFile output, AtomicFile::create(o.output));
  LONGKV_ASSIGN(const std::string text, read_text_file(o.file));
  LONGKV_ASSIGN(Opened opened, open_model(o.model));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  LONGKV_ASSIGN(std::vector<int32_t> ids, tokenizer.encode(text, /*add_special=*/true, /*parse_special=*/false));
  // The last chunk is what is compared, so it must be whole.
  const int64_t wanted = std::min(int64_t(ids.size()), opened.context) / o.queries * o.queries;
  if (wanted <= budget) {
    return fail(Code::kInvalidArgument,
                "'{}' has {} tokens (context {}); a search with a budget of {} needs more, in whole multiples of "
                "--queries {}",
                o.file, ids.size(), opened.context, budget, o.queries);
  }
  ids.resize(size_t(wanted));
  opened.chunk = o.queries;
  opened.context = wanted;
  LONGKV_ASSIGN(const auto session, make_session(opened));
  const KvShape& shape = session->kv().cache().shape();
  AssignmentSearch searched(shape, budget, *opened.pool);
  log_info("search-prefill: {} tokens of '{}', {} rows a query, compared over the last {} queries", wanted, o.file,
           budget, o.queries);
  session->kv().set_prefill_observer([&](int layer, const PrefillAttendArgs& chunk, int64_t prompt_end) {
    if (chunk.first_position + chunk.tokens < prompt_end || shape.window_of(layer) > 0) return;
    searched.choose(layer, chunk);
    for (size_t head = 0; head < searched.errors()[size_t(layer)].size(); ++head) {
      const PrefillPairs& pairs = searched.pairs()[size_t(layer)][head];
      log_info("layer {:>3} head {:>3}: {:<28} error {:.4f}, {:.1f}% of the scores", layer, head,
               pattern_text(searched.assignment()[size_t(layer)][head]), searched.errors()[size_t(layer)][head],
               100.0 * double(pairs.attended) / double(pairs.causal));
    }
  });
  LONGKV_TRY(session->prefill(ids, {}, install_interrupt_flag()));
  const std::string written = write_assignment(searched.assignment(), searched.errors());
  LONGKV_TRY(output.write({reinterpret_cast<const uint8_t*>(written.data()), written.size()}));
  LONGKV_TRY(output.commit());
  if (o.global.json) return print(written);
  return print(fmt::format("{}\n", o.output));
}

}  // namespace

void add_search_prefill(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<SearchOptions>();
  CLI::App* command =
      app.add_subcommand("search-prefill", "Choose a sparse prefill pattern for each head from one long prompt");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/false);
  hide_card_options(*command);
  command->add_option("-f,--file", o->file, "Calibration text ('-' = standard input)")->required();
  command->add_option("-o,--output", o->output, "Assignment to write; use it as --kv minference:file=FILE")->required();
  command->add_option("--budget", o->budget, "Rows that a query attends on average, the same for every pattern")
      ->capture_default_str();
  command->add_option("--queries", o->queries, "Last queries of the prompt that are compared")->capture_default_str();
  command->callback([o, &exit_code] { exit_code = report(search(*o)); });
}

}  // namespace longkv::cli
