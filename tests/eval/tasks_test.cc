// Every task: the same text for ever, the asked length, and an answer that can be read off the prompt.
#include "eval/tasks.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "eval/prompt.h"
#include "eval/scorers.h"
#include "eval/text.h"
#include "gguf/gguf.h"
#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv {
namespace {

using test::TinyModel;

Tokenizer byte_tokenizer() {
  auto file = GgufFile::open(TinyModel().write("model.gguf"));
  EXPECT_TRUE(file.ok());
  auto tokenizer = Tokenizer::from_metadata(file->metadata());
  EXPECT_TRUE(tokenizer.ok());
  return *tokenizer;
}

const Haystack& grammar() {
  static const Haystack haystack = Haystack::grammar();
  return haystack;
}

TaskRequest request(const EvalTask& task, int64_t length, int64_t index, PromptForm form = PromptForm::kPlain) {
  TaskRequest r;
  r.id.task = task.name;
  r.id.version = task.version;
  r.id.length = length;
  r.id.index = index;
  if (task.has_depth) r.id.depth = depth_of({0, 25, 50, 75, 100}, index);
  r.form = form;
  r.haystack = &grammar();
  return r;
}

std::vector<std::pair<const EvalTask*, PromptForm>> all_forms() {
  std::vector<std::pair<const EvalTask*, PromptForm>> forms;
  for (const EvalTask& t : eval_tasks()) {
    forms.emplace_back(&t, PromptForm::kPlain);
    if (t.needle_form) forms.emplace_back(&t, PromptForm::kNeedle10m);
  }
  return forms;
}

std::vector<std::string> matches(const std::string& text, const std::string& pattern, size_t group = 1) {
  std::vector<std::string> out;
  const std::regex regex(pattern);
  for (std::sregex_iterator it(text.begin(), text.end(), regex), end; it != end; ++it) out.push_back((*it)[group]);
  return out;
}

// Answers of somebody who reads the whole prompt, by rules of their own.
std::string needle_oracle(const EvalSample& s) {
  static const std::regex sentence("special magic (?:numbers|uuids) for ([A-Za-z0-9-]+) is: ([0-9a-f-]+)\\.");
  std::string answer;
  for (std::sregex_iterator it(s.context.begin(), s.context.end(), sentence), end; it != end; ++it) {
    if (has_word(s.question, (*it)[1].str())) answer += (*it)[2].str() + ", ";
  }
  return answer;
}

std::string tracking_oracle(const EvalSample& s) {
  std::map<std::string, std::string> value, parent;
  static const std::regex statement("VAR ([A-Z]+) = (?:VAR ([A-Z]+)|([0-9]+))\\.");
  for (std::sregex_iterator it(s.context.begin(), s.context.end(), statement), end; it != end; ++it) {
    if ((*it)[2].matched) {
      parent[(*it)[1]] = (*it)[2];
      value[(*it)[1]] = value[(*it)[2]];
    } else {
      value[(*it)[1]] = (*it)[3];
    }
  }
  const auto asked = matches(s.question, "VAR ([A-Z]+) =");
  if (!asked.empty()) return " VAR " + parent[asked[0]] + " = " + value[asked[0]] + ".";
  std::string answer;
  for (const auto& [name, v] : value) {
    if (has_word(s.question, v)) answer += name + " ";
  }
  return answer;
}

std::string counting_oracle(const EvalSample& s, size_t n, const std::string& pattern) {
  std::map<std::string, int> count;
  for (const std::string& word : matches(s.context, pattern)) ++count[word];
  std::vector<std::pair<int, std::string>> order;
  for (const auto& [word, c] : count) order.emplace_back(-c, word);
  std::sort(order.begin(), order.end());
  std::string answer;
  for (size_t i = 0; i < n && i < order.size(); ++i) answer += order[i].second + ", ";
  return answer;
}

std::string story_oracle(const EvalSample& s) {
  struct Chapter {
    std::string number, person, goods;
  };
  std::vector<Chapter> chapters;
  static const std::regex chapter("Chapter ([0-9]+)\\. ([A-Z][a-z]+ [A-Z][a-z]+) came to");
  for (std::sregex_iterator it(s.context.begin(), s.context.end(), chapter), end; it != end; ++it) {
    const std::string person = (*it)[2];
    const auto goods = matches(s.context, person + " bought ([a-z]+) there");
    EXPECT_EQ(goods.size(), 1u) << person;
    chapters.push_back({(*it)[1], person, goods.empty() ? "" : goods[0]});
  }
  std::string last;
  for (const Chapter& c : chapters) {
    if (s.question.find("What did " + c.person + " buy") != std::string::npos) return c.goods;
    if (s.question.find("before " + c.person + " came") != std::string::npos) return last;
    if (c.goods != "nothing") last = c.goods;
  }
  std::string quiet;
  for (const Chapter& c : chapters) quiet += c.goods == "nothing" ? c.number + ", " : "";
  return quiet;
}

std::string symbolic_oracle(const EvalSample& s) {
  std::map<std::string, int> value;
  const std::string asked = matches(s.question, "the value (-?[0-9]+)")[0];
  static const std::regex statement("assign (V[0-9]+) = (?:(V[0-9]+)(?: ([+-]) 1)?|([0-9]+))\\.");
  for (bool more = true; more;) {
    more = false;
    for (std::sregex_iterator it(s.context.begin(), s.context.end(), statement), end; it != end; ++it) {
      const std::string name = (*it)[1], parent = (*it)[2];
      if (value.contains(name) || (!parent.empty() && !value.contains(parent))) continue;
      const int step = (*it)[3] == "+" ? 1 : (*it)[3] == "-" ? -1 : 0;
      value[name] = parent.empty() ? std::stoi((*it)[4]) : value[parent] + step;
      more = true;
    }
  }
  std::string answer = "V1 V2 are no answer. Answer: ";
  for (const auto& [name, v] : value) {
    if (v == std::stoi(asked)) answer += name + ", ";
  }
  return answer;
}

std::string oracle(const EvalSample& s) {
  const std::string& task = s.id.task;
  if (task.starts_with("niah")) return needle_oracle(s);
  if (task == "passkey") return matches(s.context, "The pass key is ([0-9]+)\\.")[0];
  if (task == "number_string") return matches(s.context, "The sequence of digits is ([0-9]+)\\.")[0];
  if (task == "vt") return tracking_oracle(s);
  // The worked example of cwe ends where the second list begins.
  if (task == "cwe") {
    EvalSample list = s;
    list.context = s.context.substr(s.context.rfind("\n\n"));
    return counting_oracle(list, 10, "[0-9]+\\. ([a-z]+)");
  }
  if (task == "fwe") {
    EvalSample list = s;
    list.context = s.context.substr(s.context.rfind("\n\n"));
    return counting_oracle(list, 3, "([a-z]{6})");
  }
  if (task == "kv_retrieval") {
    const std::string key = matches(s.question, "\"([0-9a-f-]{36})\"")[0];
    const auto object = nlohmann::json::parse(s.context.substr(s.context.find('{')));
    return object[key].get<std::string>() + "\"";
  }
  if (task.starts_with("story")) return story_oracle(s);
  if (task == "gsm_symbolic") return symbolic_oracle(s);
  return {};
}

TEST(EvalTasks, AnOracleThatReadsThePromptScoresEverything) {
  for (const auto& [task, form] : all_forms()) {
    if (task->name == "perplexity") continue;
    for (int64_t index = 0; index < 8; ++index) {
      EvalSample s = task->build(request(*task, 8192, index, form), std::max<int64_t>(task->min_units, 150));
      s.id.task = task->name;
      const std::string answer = oracle(s);
      EXPECT_EQ(score_answer(s.metric, answer, s.references), 1) << task->name << " " << index << ": " << answer;
      EXPECT_LT(score_answer(s.metric, "I do not know.", s.references), 0.5) << task->name;
      for (const std::string& fact : s.facts) EXPECT_NE(s.context.find(fact), std::string::npos) << task->name;
      EXPECT_NE(s.question.find(s.asked), std::string::npos) << task->name;
      // The question must not give the answer away.
      for (const std::string& r : s.references) {
        EXPECT_FALSE(has_word(s.question + s.answer_prefix, r)) << task->name << ": " << r;
      }
    }
  }
}

TEST(EvalTasks, TextsAreThoseRecorded) {
  std::string recorded = test::file_bytes(test::golden("eval/task_hashes.txt")), now;
  for (const auto& [task, form] : all_forms()) {
    for (int64_t index = 0; index < 3; ++index) {
      const EvalSample s = task->build(request(*task, 8192, index, form), std::max<int64_t>(task->min_units, 120));
      const std::string text =
          s.context + "|" + s.question + "|" + s.answer_prefix + "|" + join(s.references, "|") + "|" + s.continuation;
      now += fmt::format("{} {} {} {} {:016x}\n", task->name, task->version, prompt_form_name(form), index,
                         uint64_t(XXH64(text.data(), text.size(), 0)));
    }
  }
  if (std::getenv("LONGKV_RECORD") != nullptr) std::ofstream(test::golden("eval/task_hashes.txt")) << now;
  EXPECT_EQ(now, recorded) << "a change of a task's text needs a new version of the task, then a new recording";
}

TEST(EvalTasks, LongerPromptsAskTheSame) {
  for (const auto& [task, form] : all_forms()) {
    if (task->name == "cwe" || task->name == "fwe" || task->name.starts_with("story") || task->name == "perplexity")
      continue;
    const EvalSample small = task->build(request(*task, 8192, 1, form), task->min_units + 20);
    const EvalSample large = task->build(request(*task, 8192, 1, form), task->min_units + 60);
    EXPECT_EQ(small.question, large.question) << task->name;
    EXPECT_EQ(small.references, large.references) << task->name;
    EXPECT_LT(small.context.size(), large.context.size()) << task->name;
  }
}

TEST(EvalTasks, PromptsFillTheLengthAndNeverExceedIt) {
  const PromptMaker maker(byte_tokenizer(), std::nullopt);
  for (const auto& [task, form] : all_forms()) {
    for (const int64_t length : {6000, 8192, 16384, 30001}) {
      const auto prompt = maker.fit(*task, request(*task, length, 2, form));
      ASSERT_TRUE(prompt.ok()) << task->name << ": " << prompt.status().message();
      EXPECT_LE(prompt->tokens(), length) << task->name;
      // One unit more does not fit.
      const auto more = maker.encode(task->build(request(*task, length, 2, form), prompt->units + 1));
      ASSERT_TRUE(more.ok()) << task->name;
      if (task->name != "perplexity" && prompt->units < task->max_units) {
        EXPECT_GT(more->tokens(), length) << task->name << " " << length;
      }
      // A byte-level tokenizer is the worst case: no unit has more tokens than this.
      EXPECT_GE(prompt->tokens(), length - 400) << task->name << " " << length;
    }
  }
}

TEST(EvalTasks, DepthsAreRealised) {
  const PromptMaker maker(byte_tokenizer(), std::nullopt);
  for (const char* name : {"passkey", "niah_single_2", "niah_multikey_2", "number_string"}) {
    const EvalTask* task = find_eval_task(name);
    for (const double depth : {0.0, 10.0, 50.0, 90.0, 100.0}) {
      TaskRequest r = request(*task, 32768, 0);
      r.id.depth = depth;
      const auto prompt = maker.fit(*task, r);
      ASSERT_TRUE(prompt.ok()) << prompt.status().message();
      // What stands before the haystack and the needle itself shift it by less than a percent each.
      EXPECT_NEAR(prompt->depth, depth, 1.5) << name;
    }
  }
}

TEST(EvalTasks, AGridIsSpreadOverAnyNumberOfSamples) {
  const std::vector<double> grid = {0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100};
  std::set<double> seen;
  for (int64_t i = 0; i < 11; ++i) seen.insert(depth_of(grid, i));
  EXPECT_EQ(seen.size(), 11u);
  const std::set<double> first = {depth_of(grid, 0), depth_of(grid, 1), depth_of(grid, 2)};
  EXPECT_LT(*first.begin(), 34);
  EXPECT_GT(*first.rbegin(), 66);
  EXPECT_EQ(depth_of({50}, 7), 50);
}

TEST(EvalTasks, WhatCannotBeIsSaid) {
  const PromptMaker maker(byte_tokenizer(), std::nullopt);
  const EvalTask* task = find_eval_task("vt");
  const auto small = maker.fit(*task, request(*task, 300, 0));
  EXPECT_EQ(small.status().code(), Code::kInvalidArgument);
  EXPECT_NE(small.status().message().find("needs at least"), std::string::npos);
  const auto unknown = choose_tasks({"passkey", "nihah"});
  EXPECT_EQ(unknown.status().code(), Code::kInvalidArgument);
  EXPECT_NE(unknown.status().message().find("'nihah'"), std::string::npos);
  EXPECT_NE(unknown.status().message().find("kv_retrieval"), std::string::npos);
  EXPECT_EQ(choose_tasks({"ruler"})->size(), 11u);
  EXPECT_EQ(choose_tasks({"niah", "niah_single_1"})->size(), 8u);
}

TEST(EvalPrompts, ALostFactOrKeyIsFound) {
  const PromptMaker maker(byte_tokenizer(), std::nullopt);
  EvalSample s = find_eval_task("passkey")->build(request(*find_eval_task("passkey"), 8192, 0), 20);
  EXPECT_TRUE(maker.encode(s).ok());
  EvalSample lost = s;
  lost.facts = {"a needle that is not there"};
  EXPECT_EQ(maker.encode(lost).status().code(), Code::kInternal);
  lost = s;
  lost.asked = "another key";
  EXPECT_EQ(maker.encode(lost).status().code(), Code::kInternal);
  lost = s;
  lost.question.clear();
  lost.answer_prefix.clear();
  EXPECT_EQ(maker.encode(lost).status().code(), Code::kInternal);
}

TEST(EvalPrompts, ATemplateStandsAroundAndTheQuestionStaysHidden) {
  const std::string path = test::tiny_chat_model().write("chat.gguf");
  const auto file = GgufFile::open(path);
  ASSERT_TRUE(file.ok());
  const auto tokenizer = Tokenizer::from_metadata(file->metadata());
  ASSERT_TRUE(tokenizer.ok());
  const auto chat = Chat::create(file->metadata(), *tokenizer);
  ASSERT_TRUE(chat.ok()) << chat.status().message();
  const PromptMaker maker(*tokenizer, *chat);
  const EvalTask* task = find_eval_task("passkey");
  const auto prompt = maker.fit(*task, request(*task, 4096, 1));
  ASSERT_TRUE(prompt.ok()) << prompt.status().message();
  const EvalSample& s = prompt->sample;
  const std::string document = tokenizer->decode({prompt->ids.data(), size_t(prompt->document)}, true);
  const std::string whole = tokenizer->decode(prompt->ids, true);
  EXPECT_NE(document.find("<|im_start|>user\n" + s.context), std::string::npos);
  EXPECT_EQ(document.find("What is the pass key?"), std::string::npos);
  EXPECT_EQ(document.find("<|im_end|>\n<|im_start|>assistant"), std::string::npos);
  const std::string tail = "<|im_end|>\n<|im_start|>assistant\n" + s.answer_prefix;
  ASSERT_GE(whole.size(), tail.size());
  EXPECT_EQ(whole.substr(whole.size() - tail.size()), tail);
  EXPECT_LE(prompt->tokens(), 4096);
}

}  // namespace
}  // namespace longkv
