// NeedleBench's single-needle retrieval from a user's folder: needles.jsonl and the haystack's lines.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "eval/data/datasets.h"
#include "eval/text.h"

namespace longkv {

namespace {

struct Needle {
  std::string needle, question, keyword;
};

struct Collection {
  std::vector<Needle> needles;
  std::vector<std::vector<std::string>> documents;  // sentences
};

Result<std::string> each_line(const std::string& path, const std::function<Status(const nlohmann::json&)>& visit) {
  LONGKV_ASSIGN(auto source, open_packed_source(path));
  RecordReader reader(std::move(source), path);
  while (true) {
    LONGKV_ASSIGN(const auto record, reader.next());
    if (!record) return reader.sha256_so_far();
    if (const Status s = visit(*record); !s.ok()) return s.with_context(reader.where());
  }
}

// Chinese sentences end without blanks.
std::vector<std::string> chinese_sentences(const std::string& text) {
  std::vector<std::string> out(1);
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t n = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    const std::string character = text.substr(i, n);
    if (character != "\n" && character != "\r") out.back() += character;
    i += n;
    const bool end = character == "。" || character == "！" || character == "？" || character == "\n";
    if ((end || out.back().size() > 180) && !out.back().empty()) out.emplace_back();
  }
  if (out.back().empty()) out.pop_back();
  return out;
}

EvalSample build(const Collection& c, bool english, const TaskRequest& request, int64_t n) {
  EvalRandom random(request.id.seed(), "needlebench");
  const Needle& needle = random.pick(c.needles);
  std::vector<int64_t> order = random.distinct(int64_t(c.documents.size()), int64_t(c.documents.size()));
  std::vector<std::string> sentences;
  for (size_t d = 0; int64_t(sentences.size()) < n; d = (d + 1) % order.size()) {
    const auto& document = c.documents[size_t(order[d])];
    const auto take = std::min<size_t>(document.size(), size_t(n) - sentences.size());
    sentences.insert(sentences.end(), document.begin(), document.begin() + int64_t(take));
  }
  EvalSample s;
  s.suite = "needlebench/own";
  s.facts = {std::string(trim(needle.needle))};
  s.context = (english ? "This is a test of reading long texts. Read the document, then answer.\n\n<document>\n"
                       : "这是一项长文本阅读测试。请阅读文档，然后回答问题。\n\n<文档>\n") +
              plant(sentences, {{request.id.depth, s.facts[0]}}, english ? " " : "") +
              (english ? "\n</document>" : "\n</文档>");
  s.question = "\n\n" + needle.question;
  s.asked = needle.question;
  s.references = {needle.keyword, s.facts[0]};
  s.metric = EvalMetric::kKeywordOrEdit;
  s.new_tokens = 64;
  return s;
}

}  // namespace

Result<Dataset> read_needlebench(const std::string& folder) {
  namespace fs = std::filesystem;
  Dataset dataset;
  dataset.kind = "needlebench";
  std::map<std::string, std::shared_ptr<Collection>> languages;
  const std::string needles = (fs::path(folder) / "needles.jsonl").string();
  LONGKV_ASSIGN(
      const std::string hash, each_line(needles, [&](const nlohmann::json& r) -> Status {
        auto& c = languages[text_field(r, "language", "English")];
        if (!c) c = std::make_shared<Collection>();
        c->needles.push_back({text_field(r, "needle"), text_field(r, "retrieval_question"), text_field(r, "arg2")});
        const Needle& added = c->needles.back();
        if (trim(added.needle).empty() || trim(added.question).empty() || added.keyword.empty()) {
          return fail(Code::kCorrupt, "needle, retrieval_question and arg2 are needed");
        }
        return {};
      }));
  dataset.files.push_back({needles, hash});
  for (auto& [language, collection] : languages) {
    const bool english = language == "English";
    const fs::path file = fs::path(folder) / (english ? "PaulGrahamEssays.jsonl" : "zh_finance.jsonl");
    LONGKV_ASSIGN(const std::string text_hash,
                  each_line(file.string(), [&, &c = *collection](const nlohmann::json& r) -> Status {
                    const std::string text = text_field(r, "text");
                    auto sentences = english ? split_sentences(text) : chinese_sentences(text);
                    if (!sentences.empty()) c.documents.push_back(std::move(sentences));
                    return {};
                  }));
    if (collection->documents.empty()) return fail(Code::kCorrupt, "'{}' has no text", file.string());
    dataset.files.push_back({file.string(), text_hash});
    EvalTask task;
    task.name = english ? "needlebench_en" : "needlebench_zh";
    task.about = "one needle of NeedleBench in its own haystack";
    task.unit = "sentences";
    task.min_units = 8;
    task.has_depth = true;
    task.build = [c = collection, english](const TaskRequest& r, int64_t n) { return build(*c, english, r, n); };
    dataset.tasks.push_back(std::move(task));
  }
  if (dataset.tasks.empty()) return fail(Code::kCorrupt, "'{}' has no needles", needles);
  return dataset;
}

}  // namespace longkv
