// RULER's qa_1 and qa_2 from the user's SQuAD and HotpotQA files: a question, its paragraphs, and as many others as
// fill a length. Unlike RULER's, every sample has an order of its own, so the answer stands at any depth.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "eval/data/datasets.h"
#include "eval/text.h"

namespace longkv {

namespace {

struct Question {
  std::string text;
  std::vector<std::string> answers;
  std::vector<size_t> paragraphs;  // that belong to it
};

struct Collection {
  std::vector<std::string> paragraphs;
  std::vector<Question> questions;
};

// SQuAD v2: data[].paragraphs[].{context, qas[]}; questions without an answer are left out.
Status add_squad(const nlohmann::json& article, Collection& c) {
  for (const nlohmann::json& paragraph : article.value("paragraphs", nlohmann::json::array())) {
    if (!paragraph.is_object()) return fail(Code::kCorrupt, "a paragraph is no object");
    const std::string context = text_field(paragraph, "context");
    if (context.empty()) return fail(Code::kCorrupt, "a paragraph has no \"context\"");
    c.paragraphs.push_back(context);
    const auto questions = paragraph.find("qas");
    if (questions == paragraph.end() || !questions->is_array()) continue;
    for (const nlohmann::json& q : *questions) {
      if (!q.is_object() || text_field(q, "is_impossible") == "true") continue;
      Question question{text_field(q, "question"), {}, {c.paragraphs.size() - 1}};
      const auto answers = q.find("answers");
      if (answers != q.end() && answers->is_array()) {
        for (const nlohmann::json& a : *answers) {
          if (a.is_object() && !text_field(a, "text").empty()) question.answers.push_back(text_field(a, "text"));
        }
      }
      if (!question.text.empty() && !question.answers.empty()) c.questions.push_back(std::move(question));
    }
  }
  return {};
}

// HotpotQA: {question, answer, context: [[title, [sentence, ...]], ...]}.
Status add_hotpot(const nlohmann::json& item, Collection& c) {
  Question question{text_field(item, "question"), {text_field(item, "answer")}, {}};
  const auto context = item.find("context");
  if (question.text.empty() || question.answers[0].empty() || context == item.end() || !context->is_array()) {
    return fail(Code::kCorrupt, "question, answer and context are needed");
  }
  for (const nlohmann::json& pair : *context) {
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_array()) {
      return fail(Code::kCorrupt, "context is no list of titles with sentences");
    }
    std::string text = pair[0].get<std::string>() + "\n";
    for (const nlohmann::json& sentence : pair[1]) {
      if (sentence.is_string()) text += sentence.get<std::string>();
    }
    question.paragraphs.push_back(c.paragraphs.size());
    c.paragraphs.push_back(std::move(text));
  }
  c.questions.push_back(std::move(question));
  return {};
}

EvalSample build(const Collection& c, const TaskRequest& request, int64_t n) {
  EvalRandom random(request.id.seed(), "questions");
  const Question& q = random.pick(c.questions);
  std::vector<size_t> chosen = q.paragraphs;
  // More paragraphs only add to fewer.
  const std::vector<int64_t> others = random.distinct(int64_t(c.paragraphs.size()), int64_t(c.paragraphs.size()));
  for (size_t i = 0; i < others.size() && int64_t(chosen.size()) < n; ++i) {
    const auto other = size_t(others[i]);
    if (std::find(q.paragraphs.begin(), q.paragraphs.end(), other) == q.paragraphs.end()) chosen.push_back(other);
  }
  random.shuffle(chosen);
  EvalSample s;
  s.suite = "ruler/own";
  s.context = "Answer a question from the documents below, and only from them.";
  for (size_t i = 0; i < chosen.size(); ++i)
    s.context += fmt::format("\n\nDocument {}:\n{}", i + 1, c.paragraphs[chosen[i]]);
  for (const size_t p : q.paragraphs) s.facts.push_back(c.paragraphs[p]);
  s.question = fmt::format("\n\nGive the answer alone, without other words.\n\nQuestion: {}", q.text);
  s.asked = q.text;
  s.answer_prefix = "Answer:";
  s.references = q.answers;
  s.metric = EvalMetric::kAnySubstring;
  s.stop = "\n";
  s.new_tokens = 32;
  return s;
}

}  // namespace

Result<Dataset> read_questions(const std::string& path, const std::string& kind) {
  auto collection = std::make_shared<Collection>();
  Dataset dataset;
  dataset.kind = kind;
  LONGKV_ASSIGN(auto source, open_packed_source(path));
  RecordReader reader(std::move(source), path);
  while (true) {
    LONGKV_ASSIGN(const auto record, reader.next());
    if (!record) break;
    Status added;
    if (kind == "hotpotqa") {
      added = add_hotpot(*record, *collection);
    } else {
      const auto data = record->find("data");
      if (data == record->end() || !data->is_array()) return fail(Code::kCorrupt, "{}: no \"data\"", reader.where());
      for (const nlohmann::json& article : *data) {
        if (added.ok() && article.is_object()) added = add_squad(article, *collection);
      }
    }
    if (!added.ok()) return added.with_context(reader.where());
  }
  if (collection->questions.empty()) return fail(Code::kCorrupt, "'{}' has no question with an answer", path);
  dataset.files.push_back({path, reader.sha256_so_far()});
  EvalTask task;
  task.name = kind == "hotpotqa" ? "qa_2" : "qa_1";
  task.about = "a question about one of many paragraphs (RULER)";
  task.unit = "documents";
  task.min_units = kind == "hotpotqa" ? 10 : 1;
  task.max_units = int64_t(collection->paragraphs.size());
  task.build = [c = collection](const TaskRequest& r, int64_t n) { return build(*c, r, n); };
  dataset.tasks.push_back(std::move(task));
  return dataset;
}

}  // namespace longkv
