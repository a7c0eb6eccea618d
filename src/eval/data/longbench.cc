// LongBench v1: 21 tasks, templates and caps from the user's dataset2prompt.json and dataset2maxlen.json.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/log.h"
#include "eval/chinese_words.h"
#include "eval/data/datasets.h"
#include "eval/text.h"

namespace longkv {

namespace {

struct LongBenchTask {
  EvalMetric metric;
  int64_t new_tokens;
  bool chat;               // inside the chat template
  const char* first_line;  // stop at a line break: few-shot tasks
  const char* question;    // own wording, used without dataset2prompt.json; {input} stands for the record's
};

constexpr const char* kQa =
    "\n\nAnswer the question from the text above, in a few words.\n\nQuestion: {input}\nAnswer:";
constexpr const char* kQaZh = "\n\n请根据以上文字简短回答问题。\n\n问题：{input}\n回答：";
constexpr const char* kSummary = "\n\nSummarize the text above in one page.\n\nSummary:";
constexpr const char* kQuery =
    "\n\nAnswer the query from the text above in one or more sentences.\n\nQuery: {input}\nAnswer:";
constexpr const char* kNext = "\n\n{input}";
constexpr const char* kCode = "\n{input}Next line of code:\n";

const std::map<std::string, LongBenchTask>& tasks() {
  using M = EvalMetric;
  static const std::map<std::string, LongBenchTask> list = {
      {"narrativeqa", {M::kF1, 128, true, "", kQa}},
      {"qasper", {M::kF1, 128, true, "", kQa}},
      {"multifieldqa_en", {M::kF1, 64, true, "", kQa}},
      {"multifieldqa_zh", {M::kF1Characters, 64, true, "", kQaZh}},
      {"hotpotqa", {M::kF1, 32, true, "", kQa}},
      {"2wikimqa", {M::kF1, 32, true, "", kQa}},
      {"musique", {M::kF1, 32, true, "", kQa}},
      {"dureader", {M::kRougeLCharacters, 128, true, "", kQaZh}},
      {"gov_report", {M::kRougeL, 512, true, "", kSummary}},
      {"qmsum", {M::kRougeL, 512, true, "", kQuery}},
      {"multi_news", {M::kRougeL, 512, true, "", kSummary}},
      {"vcsum", {M::kRougeLCharacters, 512, true, "", "\n\n请总结以上会议记录。\n\n会议总结："}},
      {"trec", {M::kClass, 64, false, "\n", kNext}},
      {"triviaqa", {M::kF1, 32, false, "\n", kNext}},
      {"samsum", {M::kRougeL, 128, false, "\n", kNext}},
      {"lsht", {M::kClass, 64, false, "\n", kNext}},
      {"passage_count",
       {M::kCount, 32, true, "",
        "\n\nHow many different paragraphs does the text above have, repetitions left out? Give the number "
        "alone.\n\nNumber:"}},
      {"passage_retrieval_en",
       {M::kParagraphNumber, 32, true, "",
        "\n\nWhich paragraph does this summary belong to? Answer as \"Paragraph 1\".\n\n{input}\n\nAnswer:"}},
      {"passage_retrieval_zh",
       {M::kParagraphNumber, 32, true, "", "\n\n以下摘要属于哪个段落？请回答如“段落1”。\n\n{input}\n\n答案："}},
      {"lcc", {M::kCodeSimilarity, 64, false, "", kCode}},
      {"repobench-p", {M::kCodeSimilarity, 64, false, "", kCode}},
  };
  return list;
}

}  // namespace

RecordAdapter longbench_adapter(const std::map<std::string, std::string>& prompts,
                                const std::map<std::string, int64_t>& caps) {
  return [prompts, caps](const nlohmann::json& r, const std::string& name) -> Result<EvalSample> {
    // The length-balanced set has the same tasks.
    const std::string task = name.ends_with("_e") ? name.substr(0, name.size() - 2) : name;
    const auto found = tasks().find(task);
    if (found == tasks().end()) return fail(Code::kInvalidArgument, "'{}' is no task of LongBench", name);
    const LongBenchTask& t = found->second;
    EvalSample s;
    const auto prompt = prompts.find(task);
    s.suite = prompt == prompts.end() ? "longbench/own" : "longbench";
    const std::string pattern = prompt == prompts.end() ? std::string("{context}") + t.question : prompt->second;
    const std::string context = text_field(r, "context"), input = text_field(r, "input");
    const size_t at = pattern.find("{context}");
    if (at == std::string::npos) return fail(Code::kCorrupt, "the template of {} has no {{context}}", task);
    // Only the template's own marks are replaced, never what a text happens to hold.
    s.context = replace_all(pattern.substr(0, at), "{input}", input) + context;
    const std::string rest = pattern.substr(at + 9);
    for (size_t begin = 0;;) {
      const size_t mark = rest.find("{input}", begin);
      s.question += rest.substr(begin, mark - begin);
      if (mark == std::string::npos) break;
      s.question += input;
      begin = mark + 7;
    }
    // A template that ends with the document: the question is what follows the document's last line break.
    if (s.question.empty()) {
      const size_t last = s.context.rfind('\n');
      if (last == std::string::npos || last == 0) return fail(Code::kCorrupt, "the record asks nothing");
      s.question = s.context.substr(last);
      s.context.erase(last);
    }
    s.references = texts_field(r, "answers");
    if (s.references.empty()) return fail(Code::kCorrupt, "the record has no \"answers\"");
    if (t.metric == EvalMetric::kClass) s.distractors = texts_field(r, "all_classes");
    s.metric = t.metric;
    s.chat = t.chat;
    s.stop = t.first_line;
    const auto cap = caps.find(task);
    s.new_tokens = cap == caps.end() ? t.new_tokens : std::clamp<int64_t>(cap->second, 1, 1 << 20);
    return s;
  };
}

Status use_jieba(const std::string& folder, Dataset& dataset) {
  const auto words_for = [](EvalMetric metric) {
    if (metric == EvalMetric::kF1Characters) return EvalMetric::kF1Jieba;
    return metric == EvalMetric::kRougeLCharacters ? EvalMetric::kRougeLJieba : metric;
  };
  const bool chinese = std::any_of(dataset.samples.begin(), dataset.samples.end(),
                                   [&](const EvalSample& s) { return words_for(s.metric) != s.metric; });
  if (!chinese) return {};
  const std::string found = folder.empty() ? ChineseWords::installed() : folder;
  if (found.empty()) {
    return notice(
        "Chinese answers are compared by characters, not by words as in LongBench: the package jieba was not found; "
        "install it (pip install jieba, or python3-jieba of Debian) or name its folder with --jieba");
  }
  LONGKV_ASSIGN(const auto words, ChineseWords::open(found));
  for (EvalSample& s : dataset.samples) {
    const EvalMetric metric = words_for(s.metric);
    if (metric == s.metric) continue;
    s.metric = metric;
    s.words = words;
  }
  dataset.files.push_back({"jieba/dict.txt", words->sha256()});
  return {};
}

}  // namespace longkv
