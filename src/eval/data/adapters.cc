// Records of RULER, LongBench v2, InfiniteBench, GSM-Infinite and kvpress tables as samples.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "eval/data/datasets.h"
#include "eval/text.h"

namespace longkv {

namespace {

// References come from a file: one of a megabyte would make some scores quadratic in it.
constexpr size_t kMaxReferenceBytes = size_t(64) << 10;

Status check_sample(const EvalSample& s) {
  if (s.context.empty()) return fail(Code::kCorrupt, "the record has no long text");
  if (s.question.empty() && s.answer_prefix.empty()) return fail(Code::kCorrupt, "the record asks nothing");
  if (s.references.empty()) return fail(Code::kCorrupt, "the record has no answer");
  for (const std::string& r : s.references) {
    if (r.size() > kMaxReferenceBytes) {
      return fail(Code::kCorrupt, "an answer of {} bytes; {} are the most", r.size(), kMaxReferenceBytes);
    }
  }
  return {};
}

Result<EvalSample> checked(EvalSample s) {
  LONGKV_TRY(check_sample(s));
  return s;
}

// Whether a chat template was merged into the text already.
bool has_template_marks(const std::string& text) {
  for (const char* mark :
       {"<|im_start|>", "<|start_header_id|>", "[INST]", "<start_of_turn>", "<|user|>", "<bos>", "<s>"}) {
    if (text.find(mark) != std::string::npos) return true;
  }
  return false;
}

// RULER keeps document and question in one text. The question begins at the last of its openings, or is the last line.
size_t ruler_question(const std::string& input) {
  size_t at = std::string::npos;
  for (const char* opening : {"\n\nQuestion:", "\nQuestion:", "\nWhat ", " Question:"}) {
    const size_t found = input.rfind(opening);
    if (found != std::string::npos && (at == std::string::npos || found > at)) at = found;
  }
  return at != std::string::npos ? at : input.rfind('\n');
}

int64_t ruler_cap(const std::string& task) {
  if (task.starts_with("niah")) return 128;
  if (task.starts_with("vt")) return 30;
  if (task.starts_with("cwe")) return 120;
  return task.starts_with("fwe") ? 50 : 32;
}

}  // namespace

RecordAdapter ruler_adapter() {
  return [](const nlohmann::json& r, const std::string& task) -> Result<EvalSample> {
    EvalSample s;
    s.suite = "ruler";
    std::string input = text_field(r, "input");
    if (has_template_marks(input)) {
      return fail(Code::kUnsupported,
                  "the prompts hold a chat template already; make them with RULER's \"base\" template");
    }
    s.answer_prefix = text_field(r, "answer_prefix");
    s.references = texts_field(r, "outputs");
    const size_t at = ruler_question(input);
    if (at == std::string::npos || at == 0) return fail(Code::kCorrupt, "no question is found at the end of \"input\"");
    s.context = input.substr(0, at);
    s.question = input.substr(at);
    // Some versions leave the opened answer in the input.
    if (!s.answer_prefix.empty() && std::string_view(s.question).ends_with(trim(s.answer_prefix))) {
      s.question.erase(s.question.size() - trim(s.answer_prefix).size());
    }
    s.metric = task.starts_with("qa") ? EvalMetric::kAnySubstring : EvalMetric::kAllSubstrings;
    s.new_tokens = ruler_cap(task);
    return checked(std::move(s));
  };
}

RecordAdapter longbench2_adapter() {
  return [](const nlohmann::json& r, const std::string&) -> Result<EvalSample> {
    EvalSample s;
    s.suite = "longbench2/own";
    s.context =
        "Read the text, then answer the question about it.\n\n<text>\n" + text_field(r, "context") + "\n</text>";
    s.question = fmt::format("\n\nQuestion: {}\n\n", text_field(r, "question"));
    for (const char* letter : {"A", "B", "C", "D"}) {
      const std::string choice = text_field(r, fmt::format("choice_{}", letter).c_str());
      if (choice.empty()) return fail(Code::kCorrupt, "choice_{} is missing", letter);
      s.question += fmt::format("({}) {}\n", letter, choice);
    }
    s.question += "\nAnswer in this form: \"The correct answer is (letter)\".";
    s.references = texts_field(r, "answer");
    s.metric = EvalMetric::kAnswerLetter;
    s.new_tokens = 128;
    return checked(std::move(s));
  };
}

RecordAdapter infinitebench_adapter() {
  struct Task {
    EvalMetric metric;
    int64_t new_tokens;
    const char* ask;  // after the record's own input
  };
  static const std::map<std::string, Task> tasks = {
      {"passkey", {EvalMetric::kDigitRun, 6, ""}},
      {"number_string", {EvalMetric::kDigitRun, 12, ""}},
      {"kv_retrieval", {EvalMetric::kWord, 50, ""}},
      {"longbook_sum_eng", {EvalMetric::kRougeL, 1200, "\n\nSummarize the book above.\nSummary:"}},
      {"longbook_qa_eng", {EvalMetric::kF1, 40, "\nAnswer the question as concisely as you can.\nAnswer:"}},
      {"longbook_choice_eng",
       {EvalMetric::kLetter, 40, "\nAnswer with the letter of the right choice alone.\nAnswer:"}},
      {"longbook_qa_chn", {EvalMetric::kF1Characters, 40, "\n请尽量简短地回答。\n答案："}},
      {"longdialogue_qa_eng", {EvalMetric::kName, 40, "\nWhich name belongs where \"$$MASK$$\" stands?\nName:"}},
      {"code_debug",
       {EvalMetric::kLetterOrName, 5, "\nOne function holds a deliberate error. Answer with its letter.\nAnswer:"}},
      {"code_run", {EvalMetric::kLastInteger, 5, "\nAnswer with the number alone.\nAnswer:"}},
      {"math_find", {EvalMetric::kFirstNumber, 3, "\nAnswer with the number alone.\nAnswer:"}},
      {"math_calc",
       {EvalMetric::kRunningValues, 30000, "\nGive every intermediate result, separated by commas.\nValues:"}},
  };
  return [](const nlohmann::json& r, const std::string& task) -> Result<EvalSample> {
    const auto found = tasks.find(task);
    if (found == tasks.end()) return fail(Code::kInvalidArgument, "'{}' is no task of InfiniteBench", task);
    EvalSample s;
    s.suite = "infinitebench/own";
    s.context = text_field(r, "context");
    s.question = "\n\n" + text_field(r, "input");
    s.references = texts_field(r, "answer");
    const std::vector<std::string> options = texts_field(r, "options");
    for (size_t i = 0; i < options.size() && i < 26; ++i)
      s.question += fmt::format("\n{}. {}", char('A' + i), options[i]);
    s.question += found->second.ask;
    s.metric = found->second.metric;
    s.new_tokens = found->second.new_tokens;
    // The published answer of a choice is the option's text; its letter is judged, and for code_debug both.
    if (s.metric == EvalMetric::kLetter || s.metric == EvalMetric::kLetterOrName) {
      std::vector<std::string> letters;
      for (const std::string& a : s.references) {
        const auto at = std::find(options.begin(), options.end(), a);
        if (at != options.end()) letters.emplace_back(1, char('A' + (at - options.begin())));
      }
      if (s.metric == EvalMetric::kLetter && !letters.empty()) s.references = letters;
      if (s.metric == EvalMetric::kLetterOrName)
        s.references.insert(s.references.end(), letters.begin(), letters.end());
    }
    return checked(std::move(s));
  };
}

RecordAdapter gsm_infinite_adapter() {
  return [](const nlohmann::json& r, const std::string&) -> Result<EvalSample> {
    EvalSample s;
    s.suite = "gsm_infinite";
    s.context = text_field(r, "problem");
    s.question = "\n\n" + text_field(r, "question");
    s.references = texts_field(r, "answer_list");
    s.metric = EvalMetric::kVariableSet;
    s.new_tokens = 2048;
    if (s.references.empty()) {
      // Medium and hard: the number at the end of the recorded solution.
      const std::vector<std::string> numbers = digit_runs(text_field(r, "solution"));
      if (!numbers.empty()) s.references = {numbers.back()};
      s.metric = EvalMetric::kAnswerNumber;
    }
    return checked(std::move(s));
  };
}

RecordAdapter kvpress_adapter() {
  return [](const nlohmann::json& r, const std::string&) -> Result<EvalSample> {
    EvalSample s;
    s.suite = "kvpress";
    s.context = text_field(r, "context");
    s.question = text_field(r, "question");
    s.answer_prefix = text_field(r, "answer_prefix");
    s.references = texts_field(r, "answer");
    s.metric = EvalMetric::kAllSubstrings;
    const std::vector<std::string> cap = digit_runs(text_field(r, "max_new_tokens", "64"));
    // At most a million new tokens: the number comes from a file.
    s.new_tokens = cap.empty() || cap[0].size() > 6 ? 64 : std::max<int64_t>(1, std::stoll(cap[0]));
    return checked(std::move(s));
  };
}

}  // namespace longkv
