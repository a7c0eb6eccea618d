// Answers, captured mass, errors, bytes and times of many recipes after one reading of each prompt.
//
//   recipes_bench MODEL DIRECTORY THREADS SECONDS RECIPE...
//
// No prompt is begun after SECONDS. DIRECTORY holds NAME.document, NAME.question and NAME.answer, as
// bench/needle_tasks.py --write makes them. The document is read once with full attention; every recipe follows that
// reading (KvSession::add_follower), decodes the question and answers greedily, each token also with full attention for
// the comparison. Recipes that change what the prompt's tokens attend read it by themselves.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "engine/session.h"
#include "tokenizer/tokenizer.h"

namespace longkv {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

struct Totals {
  std::map<std::string, std::pair<int, int>> right;  // of, by task
  double mass = 0, error = 0, kl = 0, kv_bytes = 0, index_bytes = 0, select = 0, attend = 0;
  int64_t steps = 0;
};

Result<bool> answer(Session& session, const Tokenizer& tokenizer, const std::string& question,
                    const std::string& expected) {
  LONGKV_ASSIGN(const std::vector<int32_t> ids, tokenizer.encode(question, false, false));
  for (const int32_t id : ids) LONGKV_TRY(session.decode(id));
  session.kv().reset_stats();
  std::string text;
  for (size_t i = 0; i < expected.size() + 1 && text.size() < expected.size(); ++i) {
    const auto logits = session.logits();
    const auto best = int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
    text += tokenizer.piece(best);
    if (tokenizer.is_eog(best)) break;
    LONGKV_TRY(session.decode(best));
  }
  return text.starts_with(expected);
}

Status run(const std::string& model_path, const std::string& directory, int threads, double seconds,
           const std::vector<std::string>& recipes) {
  const double begin = now();
  LONGKV_ASSIGN(const auto model, LoadedModel::load(model_path));
  LONGKV_ASSIGN(const Tokenizer tokenizer, Tokenizer::from_metadata(model->file().metadata()));
  ThreadPool pool(threads);
  std::vector<std::filesystem::path> documents;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() == ".document") documents.push_back(entry.path());
  }
  std::sort(documents.begin(), documents.end());
  std::map<std::string, Totals> totals;
  for (const auto& document : documents) {
    if (now() - begin > seconds) break;
    const std::string question = read_text(std::filesystem::path(document).replace_extension("question"));
    const std::string expected = read_text(std::filesystem::path(document).replace_extension("answer"));
    const std::string name = document.stem().string();
    const std::string task = name.substr(name.find('-') + 1, name.rfind('-') - name.find('-') - 1);
    LONGKV_ASSIGN(const std::vector<int32_t> ids, tokenizer.encode(read_text(document), true, false));
    SessionOptions options;
    options.context = int64_t(ids.size() + question.size() + expected.size()) + 64;
    LONGKV_ASSIGN(const auto session, Session::create(model, options, pool));
    std::vector<std::unique_ptr<KvSession>> sides;
    for (const std::string& text : recipes) {
      LONGKV_ASSIGN(const Recipe recipe, parse_recipe(text));
      LONGKV_ASSIGN(auto side, session->make_kv(recipe));
      if (!side->changes_prompt()) session->kv().add_follower(side.get());
      sides.push_back(std::move(side));
    }
    const double start = now();
    LONGKV_TRY(session->prefill(ids));
    session->kv().clear_followers();
    fmt::print(stderr, "{}: {} tokens read in {:.1f} s\n", name, ids.size(), now() - start);
    for (size_t i = 0; i < recipes.size(); ++i) {
      const std::string& text = recipes[i];
      session->exchange_kv(sides[i]);
      if (session->kv().changes_prompt()) LONGKV_TRY(session->prefill(ids));
      session->set_check_every(1);
      // The session sums over everything that it decoded, also under other recipes.
      const int64_t steps_before = session->kl_steps();
      const double kl_before = session->kl_mean() * double(steps_before);
      LONGKV_ASSIGN(const bool right, answer(*session, tokenizer, question, expected));
      const double kl = session->kl_mean() * double(session->kl_steps()) - kl_before;
      Totals& t = totals[text];
      auto& [good, of] = t.right[task];
      good += right ? 1 : 0;
      ++of;
      const KvStats& stats = session->kv().stats();
      for (const double m : stats.captured_mass) t.mass += m / double(stats.captured_mass.size());
      for (const double e : stats.output_error) t.error += e / double(stats.output_error.size());
      t.kl += kl / double(session->kl_steps() - steps_before) * double(stats.steps);
      t.kv_bytes += double(stats.kv_bytes);
      t.index_bytes += double(stats.index_bytes);
      t.select += stats.seconds_select;
      t.attend += stats.seconds_attend;
      t.steps += stats.steps;
      session->exchange_kv(sides[i]);
      sides[i].reset();
      fmt::print(stderr, "  {} {}: {}\n", task, text, right ? "right" : "wrong");
    }
  }
  fmt::print("| recipe | answers | mass | error | KL | KV KB | index KB | select us | attend us |\n");
  fmt::print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (const std::string& text : recipes) {
    const Totals& t = totals[text];
    const double n = double(std::max<int64_t>(1, t.steps));
    std::string answers;
    for (const auto& [task, score] : t.right) {
      answers += fmt::format("{}{} {}/{}", answers.empty() ? "" : ", ", task, score.first, score.second);
    }
    fmt::print("| {} | {} | {:.3f} | {:.3f} | {:.1e} | {:.0f} | {:.0f} | {:.0f} | {:.0f} |\n", text, answers,
               t.mass / n, t.error / n, t.kl / n, t.kv_bytes / n / 1024, t.index_bytes / n / 1024, t.select / n * 1e6,
               t.attend / n * 1e6);
  }
  return {};
}

}  // namespace
}  // namespace longkv

int main(int argc, char** argv) {
  if (argc < 6) {
    fmt::print(stderr, "usage: recipes_bench MODEL DIRECTORY THREADS SECONDS RECIPE...\n");
    return 2;
  }
  const std::vector<std::string> recipes(argv + 5, argv + argc);
  const longkv::Status status = longkv::run(argv[1], argv[2], std::atoi(argv[3]), std::atof(argv[4]), recipes);
  if (!status.ok()) fmt::print(stderr, "{}\n", status.message());
  return status.ok() ? 0 : 1;
}
