// `longkv score`: likelihoods and answers for prompts that come as lines of JSON, for harnesses such as lm-eval.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>

#include "base/error.h"
#include "base/inputs.h"
#include "base/log.h"
#include "commands.h"
#include "common.h"
#include "engine/text_scorer.h"
#include "interrupt.h"
#include "line_reader.h"
#include "output.h"

namespace longkv::cli {

namespace {

using Json = nlohmann::ordered_json;

struct ScoreOptions {
  GlobalOptions global;
  ModelOptions model;
  std::string file = "-";
};

// What a request of each kind may have.
constexpr const char* kContinues[] = {"id", "prompt", "continuation"};
constexpr const char* kRolls[] = {"id", "text", "skip"};
constexpr const char* kAnswers[] = {"id", "prompt", "max_tokens", "stop"};
constexpr const char* kCounts[] = {"id", "count"};

constexpr size_t kMaxStops = 64;
constexpr int kMaxDepth = 8;

Result<std::string> text_field(const Json& request, const char* name, bool wanted) {
  const auto found = request.find(name);
  if (found == request.end()) {
    if (!wanted) return std::string();
    return fail(Code::kInvalidArgument, "\"{}\" is missing", name);
  }
  if (!found->is_string()) return fail(Code::kInvalidArgument, "\"{}\" must be a text", name);
  return found->get<std::string>();
}

Result<std::vector<std::string>> stops_of(const Json& request) {
  std::vector<std::string> stops;
  const auto found = request.find("stop");
  if (found == request.end()) return stops;
  const Json list = found->is_array() ? *found : Json::array({*found});
  if (list.size() > kMaxStops) return fail(Code::kInvalidArgument, "\"stop\" has more than {} texts", kMaxStops);
  for (const Json& stop : list) {
    if (!stop.is_string()) return fail(Code::kInvalidArgument, "\"stop\" must be a text or a list of them");
    stops.push_back(stop.get<std::string>());
  }
  return stops;
}

Result<Json> read_request(const std::string& line) {
  bool deep = false;
  const Json request = Json::parse(
      line,
      [&](int depth, Json::parse_event_t, Json&) {
        deep = deep || depth > kMaxDepth;
        return !deep;
      },
      /*allow_exceptions=*/false);
  if (deep) return fail(Code::kInvalidArgument, "it is nested deeper than {} levels", kMaxDepth);
  if (!request.is_object()) return fail(Code::kInvalidArgument, "it is not an object of JSON in UTF-8");
  // The reader made a rounded number of one that 64 bits do not hold; it could not come back as it was.
  const auto id = request.find("id");
  if (id != request.end() && id->is_number_float() && std::abs(id->get<double>()) >= 0x1p63)
    return fail(Code::kInvalidArgument, "\"id\" is a number that does not fit 64 bits; send it as a text");
  return request;
}

// A key that says nothing here was meant to say something: it is misspelt, or of another kind of request.
Status check_keys(const Json& request, std::span<const char* const> known) {
  for (const auto& [key, value] : request.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    return fail(Code::kInvalidArgument, "\"{}\" is not a key of such a request; known are {}", key.substr(0, 64),
                fmt::join(known, ", "));
  }
  return {};
}

// What one request gives; its errors are the request's own.
Result<Json> answer_request(TextScorer& scorer, const Json& request) {
  Json out;
  const bool continues = request.contains("continuation"), rolls = request.contains("text"),
             answers = request.contains("max_tokens"), counts = request.contains("count");
  if (continues + rolls + answers + counts != 1) {
    return fail(
        Code::kInvalidArgument,
        "one of \"continuation\" (score it after \"prompt\"), \"text\" (score all of it, or what follows \"skip\" "
        "tokens), \"max_tokens\" (answer \"prompt\") and \"count\" (a text's tokens) is needed; {} are there",
        continues + rolls + answers + counts);
  }
  using Keys = std::span<const char* const>;
  LONGKV_TRY(check_keys(request, continues ? Keys(kContinues)
                                 : rolls   ? Keys(kRolls)
                                 : answers ? Keys(kAnswers)
                                           : Keys(kCounts)));
  if (counts) {
    LONGKV_ASSIGN(const std::string text, text_field(request, "count", true));
    LONGKV_ASSIGN(out["tokens"], scorer.count(text));
    return out;
  }
  if (answers) {
    const Json& n = request["max_tokens"];
    if (!n.is_number_integer() || n.get<int64_t>() < 1 || n.get<int64_t>() > (int64_t(1) << 24))
      return fail(Code::kInvalidArgument, "\"max_tokens\" must be a positive number");
    LONGKV_ASSIGN(const std::string prompt, text_field(request, "prompt", true));
    LONGKV_ASSIGN(const std::vector<std::string> stops, stops_of(request));
    LONGKV_ASSIGN(const GreedyAnswer answer, scorer.answer(prompt, stops, n.get<int64_t>()));
    out["text"] = answer.text;
    out["tokens"] = answer.tokens;
    out["finish"] = answer.finish;
    return out;
  }
  ScoredContinuation scored;
  if (rolls) {
    LONGKV_ASSIGN(const std::string text, text_field(request, "text", true));
    const auto skip = request.find("skip");
    if (skip != request.end() && !skip->is_number_integer())
      return fail(Code::kInvalidArgument, "\"skip\" must be a number of tokens");
    LONGKV_ASSIGN(scored,
                  skip == request.end() ? scorer.score_rolling(text) : scorer.score_after(text, skip->get<int64_t>()));
  } else {
    LONGKV_ASSIGN(const std::string prompt, text_field(request, "prompt", false));
    LONGKV_ASSIGN(const std::string continuation, text_field(request, "continuation", true));
    LONGKV_ASSIGN(scored, scorer.score(prompt, continuation));
  }
  out["log_likelihood"] = scored.log_likelihood;
  out["tokens"] = scored.tokens;
  out["greedy"] = scored.greedy;
  return out;
}

struct InputFile {
  int fd = STDIN_FILENO;
  ~InputFile() {
    if (fd > STDIN_FILENO) ::close(fd);
  }
};

Status run_score(const ScoreOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  InputFile input;
  if (o.file != "-") {
    LONGKV_TRY(check_readable(o.file));
    input.fd = ::open(o.file.c_str(), O_RDONLY | O_CLOEXEC);
    if (input.fd < 0) return fail(Code::kIo, "cannot open '{}': {}", o.file, std::strerror(errno));
  }
  ModelOptions m = o.model;
  m.can_use_card = m.can_use_disk = true;
  LONGKV_ASSIGN(const Opened opened, open_model(m));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  LONGKV_ASSIGN(const auto session, make_session(opened));
  const std::atomic<bool>* cancel = install_interrupt_flag();
  TextScorer scorer(*session, tokenizer, cancel);
  log_info("{} under {}, at most {} tokens; one line of JSON a request", opened.model->config().name,
           opened.recipe.canonical(), opened.context);
  LineReader lines(input.fd);
  std::string line;
  int64_t number = 0, refused = 0;
  while (true) {
    LONGKV_ASSIGN(const bool more, lines.next(line, cancel));
    if (!more) break;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    Json reply;
    Result<Json> request = read_request(line);
    if (request.ok() && request->contains("id")) reply["id"] = (*request)["id"];
    const Result<Json> answer = request.ok() ? answer_request(scorer, *request) : Result<Json>(request.status());
    if (answer.ok()) {
      reply.update(*answer);
    } else if (answer.status().code() == Code::kInvalidArgument) {
      reply["error"] = fmt::format("line {}: {}", number, answer.status().message());
      ++refused;
    } else {
      return answer.status();
    }
    LONGKV_TRY(print(json_text(reply, -1)));
  }
  if (cancel->load()) return fail(Code::kCancelled, "interrupted after line {}", number);
  if (refused > 0) return fail(Code::kCorrupt, "{} of {} lines were refused; see their \"error\"", refused, number);
  return {};
}

}  // namespace

void add_score(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<ScoreOptions>();
  CLI::App* command =
      app.add_subcommand("score", "Log-likelihoods and greedy answers for lines of JSON, as harnesses want them");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/true);
  command->add_option("-f,--file", o->file, "Requests, a line each ('-' = standard input)")->capture_default_str();
  command->callback([o, &exit_code] { exit_code = report(run_score(*o)); });
}

}  // namespace longkv::cli
