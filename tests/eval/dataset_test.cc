// Users' files: what is recognised, what becomes of a record, and files that are damaged or hostile.
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "eval/data/csv_reader.h"
#include "eval/data/datasets.h"
#include "eval/scorers.h"
#include "support/paths.h"
#include "support/program.h"

namespace longkv {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string write(const std::string& name, const std::string& content) {
  const std::string path = test::temp_path("data/" + name);
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

Dataset read(const std::string& path, int64_t samples = 100, const std::string& kind = "") {
  DatasetRequest r;
  r.kind = kind;
  r.path = path;
  r.samples = samples;
  auto d = read_dataset(r);
  EXPECT_TRUE(d.ok()) << d.status().message();
  return d.ok() ? *d : Dataset{};
}

Status refused(const std::string& path, const std::string& kind = "") {
  DatasetRequest r;
  r.kind = kind;
  r.path = path;
  r.samples = 10;
  return read_dataset(r).status();
}

TEST(Datasets, Ruler) {
  const Json record = {{"index", 5},
                       {"input",
                        "Some special magic numbers are hidden.\nfiller text here\nWhat are all the special magic "
                        "numbers for K? "},
                       {"outputs", {"123", "456"}},
                       {"answer_prefix", " The special magic numbers for K are"},
                       {"length", 4000}};
  write("ruler/niah_multivalue/validation.jsonl", record.dump() + "\r\n\r\n" + record.dump() + "\n");
  const Dataset d = read(test::temp_path("data/ruler"));
  EXPECT_EQ(d.kind, "ruler");
  ASSERT_EQ(d.samples.size(), 2u);
  const EvalSample& s = d.samples[1];
  EXPECT_EQ(s.id.task, "niah_multivalue");
  EXPECT_EQ(s.id.index, 1) << "lines are counted; \"index\" is no sample number";
  EXPECT_EQ(s.context, "Some special magic numbers are hidden.\nfiller text here");
  EXPECT_EQ(s.question, "\nWhat are all the special magic numbers for K? ");
  EXPECT_EQ(s.references.size(), 2u);
  EXPECT_EQ(s.new_tokens, 128);
  EXPECT_EQ(score_answer(s.metric, "456", s.references), 0.5);
  ASSERT_EQ(d.files.size(), 1u);
  EXPECT_EQ(d.files[0].sha256.size(), 64u);
  Json merged = record;
  merged["input"] = "<|im_start|>user\ntext\nWhat is it?";
  EXPECT_EQ(refused(write("merged/vt/validation.jsonl", merged.dump())).code(), Code::kUnsupported);
}

TEST(Datasets, LongBenchWithTheUsersTemplates) {
  const Json qa = {{"input", "Who {context}?"},
                   {"context", "A text with {input} in it."},
                   {"answers", {"Ann", "Anne"}},
                   {"all_classes", nullptr},
                   {"dataset", "qasper"},
                   {"_id", "1"},
                   {"length", 6},
                   {"language", "en"}};
  Json trec = qa;
  trec["dataset"] = "trec";
  trec["all_classes"] = {"Food", "Sport"};
  trec["answers"] = {"Food"};
  write("lb/data/qasper.jsonl", qa.dump() + "\n");
  write("lb/data/trec_e.jsonl", trec.dump() + "\n");
  write("lb/config/dataset2prompt.json",
        Json{{"qasper", "Read.\n\n{context}\n\nQ: {input}\nA: "}, {"trec", "Classify.\n{context}\n{input}"}}.dump());
  write("lb/config/dataset2maxlen.json", Json{{"qasper", 77}}.dump());
  const Dataset d = read(test::temp_path("data/lb/data"));
  ASSERT_EQ(d.samples.size(), 2u);
  EXPECT_EQ(d.samples[0].suite, "longbench");
  EXPECT_EQ(d.samples[0].context, "Read.\n\nA text with {input} in it.") << "a text's own braces are no template";
  EXPECT_EQ(d.samples[0].question, "\n\nQ: Who {context}?\nA: ");
  EXPECT_EQ(d.samples[0].new_tokens, 77);
  EXPECT_TRUE(d.samples[0].chat);
  EXPECT_FALSE(d.samples[1].chat);
  EXPECT_EQ(d.samples[1].stop, "\n");
  EXPECT_EQ(d.samples[1].distractors.size(), 2u);
  const Dataset own = read(write("lb_own/qasper.jsonl", qa.dump() + "\n"));
  EXPECT_EQ(own.samples[0].suite, "longbench/own");
}

// A zip archive with one deflated and one stored member.
std::string zip_of(const std::vector<std::pair<std::string, std::string>>& files, bool deflated) {
  std::string out, directory;
  const auto number = [](uint32_t v, int bytes) {
    std::string s;
    for (int i = 0; i < bytes; ++i) s += char(v >> (8 * i));
    return s;
  };
  for (const auto& [name, content] : files) {
    std::string packed = content;
    if (deflated) {
      packed.assign(compressBound(content.size()) + 16, '\0');
      z_stream z{};
      deflateInit2(&z, 9, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
      z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
      z.avail_in = uInt(content.size());
      z.next_out = reinterpret_cast<Bytef*>(packed.data());
      z.avail_out = uInt(packed.size());
      deflate(&z, Z_FINISH);
      packed.resize(z.total_out);
      deflateEnd(&z);
    }
    const auto crc = uint32_t(crc32(0, reinterpret_cast<const Bytef*>(content.data()), uInt(content.size())));
    const std::string head = number(20, 2) + number(0, 2) + number(deflated ? 8 : 0, 2) + number(0, 4) +
                             number(crc, 4) + number(uint32_t(packed.size()), 4) + number(uint32_t(content.size()), 4) +
                             number(uint32_t(name.size()), 2) + number(0, 2);
    directory += "PK\x01\x02" + number(20, 2) + head + number(0, 2) + number(0, 2) + number(0, 2) + number(0, 4) +
                 number(uint32_t(out.size()), 4) + name;
    out += "PK\x03\x04" + head + name + packed;
  }
  const auto start = uint32_t(out.size());
  out += directory + "PK\x05\x06" + number(0, 4) + number(uint32_t(files.size()), 2) +
         number(uint32_t(files.size()), 2) + number(uint32_t(directory.size()), 4) + number(start, 4) + number(0, 2);
  return out;
}

TEST(Datasets, ZipArchivesAreReadInPlace) {
  Json qa = {{"input", "Who?"},
             {"context", std::string(40000, 'x')},
             {"answers", {"Ann"}},
             {"all_classes", nullptr},
             {"dataset", "hotpotqa"}};
  for (const bool deflated : {false, true}) {
    const std::string archive = zip_of({{"data/hotpotqa.jsonl", qa.dump() + "\n" + qa.dump() + "\n"},
                                        {"data/qasper.jsonl", Json(qa).dump() + "\n"},
                                        {"readme.txt", "nothing"}},
                                       deflated);
    const std::string path = write("data.zip", archive);
    EXPECT_EQ(read(path).samples.size(), 3u);
    // Any byte may be damaged, any part may be missing: a message, never a crash or a wrong text.
    for (size_t cut = 0; cut < archive.size(); cut += archive.size() / 23 + 1) {
      EXPECT_FALSE(refused(write("cut.zip", archive.substr(0, cut))).ok()) << cut;
    }
    for (size_t at = 0; at < archive.size(); at += archive.size() / 97 + 1) {
      std::string damaged = archive;
      damaged[at] = char(damaged[at] ^ 0x41);
      const Status s = refused(write("damaged.zip", damaged));
      if (at > 60 && at < 200) {
        EXPECT_FALSE(s.ok()) << at;
      }
    }
  }
}

TEST(Datasets, LongBenchTwoIsOneArray) {
  Json item = {
      {"_id", "a"},          {"question", "Why?"}, {"choice_A", "w"}, {"choice_B", "x"},
      {"choice_C", "y"},     {"choice_D", "z"},    {"answer", "C"},   {"context", "text with ] } \" and \\ in it"},
      {"difficulty", "hard"}};
  const Dataset d = read(write("lb2/data.json", "\xef\xbb\xbf [\n" + item.dump(2) + ",\n" + item.dump() + "]"));
  EXPECT_EQ(d.kind, "longbench2");
  ASSERT_EQ(d.samples.size(), 2u);
  EXPECT_NE(d.samples[0].question.find("(C) y"), std::string::npos);
  EXPECT_EQ(score_answer(d.samples[0].metric, "The correct answer is (C).", d.samples[0].references), 1);
  const Status cut = refused(write("lb2cut/data.json", "[" + item.dump() + ",\n" + item.dump().substr(0, 50)));
  EXPECT_EQ(cut.code(), Code::kCorrupt);
  EXPECT_NE(cut.message().find("line 2"), std::string::npos) << cut.message();
}

TEST(Datasets, InfiniteBenchTakesScalarsAndLists) {
  const Json scalar = {
      {"id", 0}, {"context", "c"}, {"input", "Key: \"k\"?"}, {"answer", 712}, {"options", Json::array()}};
  Json list = scalar;
  list["answer"] = {"00712"};
  const Dataset d = read(write("ib/passkey.jsonl", scalar.dump() + "\n" + list.dump() + "\n"), 100, "infinitebench");
  ASSERT_EQ(d.samples.size(), 2u);
  EXPECT_EQ(score_answer(d.samples[0].metric, "712", d.samples[0].references), 1);
  EXPECT_EQ(score_answer(d.samples[1].metric, "712", d.samples[1].references), 0);
  Json debug = scalar;
  debug["answer"] = {"parse"};
  debug["options"] = {"load", "parse", "store"};
  const Dataset c = read(write("ib2/code_debug.jsonl", debug.dump()), 100, "infinitebench");
  EXPECT_EQ(score_answer(c.samples[0].metric, "B", c.samples[0].references), 1);
  EXPECT_EQ(score_answer(c.samples[0].metric, "A", c.samples[0].references), 0);
  EXPECT_FALSE(refused(write("ib3/unknown.jsonl", scalar.dump()), "infinitebench").ok());
}

TEST(Datasets, KvpressTablesAndGsm) {
  const Dataset csv =
      read(write("kp/table.csv",
                 "context,question,answer_prefix,answer,task,max_new_tokens\r\n"
                 "\"a \"\"long\"\" text,\nin two lines\",Which?,It is,\"[\"\"12\"\", \"\"13\"\"]\",niah,20\r\n"));
  ASSERT_EQ(csv.samples.size(), 1u);
  EXPECT_EQ(csv.kind, "kvpress");
  EXPECT_EQ(csv.samples[0].context, "a \"long\" text,\nin two lines");
  EXPECT_EQ(csv.samples[0].references, (std::vector<std::string>{"12", "13"}));
  EXPECT_EQ(csv.samples[0].id.task, "niah");
  EXPECT_EQ(csv.samples[0].new_tokens, 20);
  EXPECT_NE(refused(write("kp2/t.csv", "a,b\n1,2,3\n"), "kvpress").message().find("3 cells, the first row names 2"),
            std::string::npos);
  EXPECT_FALSE(refused(write("kp3/t.csv", "a,b\n\"1,2\n"), "kvpress").ok());
  const Json gsm = {
      {"op", 3}, {"problem", "assign V123456 = 1."}, {"question", "Which?"}, {"answer_list", {"V123456"}}};
  const Dataset g = read(write("gsm/ops_3.jsonl", gsm.dump()));
  EXPECT_EQ(g.kind, "gsm_infinite");
  EXPECT_EQ(score_answer(g.samples[0].metric, "Answer: V123456", g.samples[0].references), 1);
}

TEST(Datasets, NeedleBenchFolders) {
  write("nb/needles.jsonl", Json{{"needle", "\nThe hidden word is Zebra.\n"},
                                 {"retrieval_question", "What is hidden?"},
                                 {"arg1", "x"},
                                 {"arg2", "Zebra"},
                                 {"language", "English"}}
                                .dump());
  write("nb/PaulGrahamEssays.jsonl", Json{{"text", "One sentence. Another one. A third."}}.dump() + "\n");
  const Dataset d = read(test::temp_path("data/nb"));
  ASSERT_EQ(d.tasks.size(), 1u);
  TaskRequest r;
  r.id.task = "needlebench_en";
  r.id.depth = 50;
  const EvalSample s = d.tasks[0].build(r, 10);
  const size_t at = s.context.find("The hidden word is Zebra.");
  ASSERT_NE(at, std::string::npos);
  EXPECT_NEAR(double(at) / double(s.context.size()), 0.6, 0.15);
  EXPECT_EQ(score_answer(s.metric, "Zebra!", s.references), 1);
}

TEST(Datasets, QuestionsOverParagraphs) {
  Json squad = {{"data", Json::array()}};
  Json article = {{"title", "t"}, {"paragraphs", Json::array()}};
  for (int i = 0; i < 30; ++i) {
    const std::string n = std::to_string(i);
    article["paragraphs"].push_back({{"context", "The value of thing" + n + " is word" + n + "."},
                                     {"qas",
                                      {{{"question", "What is thing" + n + "?"},
                                        {"is_impossible", i % 2 == 1},
                                        {"answers", {{{"text", "word" + n}}}}}}}});
  }
  squad["data"].push_back(article);
  const Dataset d = read(write("squad/dev.json", squad.dump()), 5, "squad");
  ASSERT_EQ(d.tasks.size(), 1u);
  EXPECT_EQ(d.tasks[0].name, "qa_1");
  TaskRequest r;
  r.id.task = "qa_1";
  const EvalSample few = d.tasks[0].build(r, 3), many = d.tasks[0].build(r, 20);
  EXPECT_EQ(few.question, many.question);
  EXPECT_NE(many.context.find("Document 20:"), std::string::npos);
  EXPECT_EQ(many.context.find("Document 21:"), std::string::npos);
  EXPECT_NE(many.context.find(many.facts[0]), std::string::npos);
  EXPECT_EQ(score_answer(many.metric, "it is " + many.references[0], many.references), 1);
  const std::string hop =
      R"({"question": "Who?", "answer": "Ann", "context": [["Title", ["One. ", "Ann did."]], ["Other", ["Two."]]]})";
  const Dataset h = read(write("hotpot/dev.json", "[" + hop + "]"), 5, "hotpotqa");
  ASSERT_EQ(h.tasks.size(), 1u);
  EXPECT_EQ(h.tasks[0].build(r, 10).facts.size(), 2u);
  EXPECT_FALSE(refused(write("hotpot/bad.json", "[{\"question\": 1}]"), "hotpotqa").ok());
}

TEST(Datasets, AChoiceOfSamplesGrowsWithItsSize) {
  std::string lines;
  for (int i = 0; i < 200; ++i) {
    lines +=
        Json{{"context", "c" + std::to_string(i)}, {"question", "q"}, {"answer_prefix", ""}, {"answer", "a"}}.dump() +
        "\n";
  }
  const std::string path = write("many/t.jsonl", lines);
  std::vector<int64_t> before;
  for (const int64_t n : {1, 5, 20, 200, 500}) {
    const Dataset d = read(path, n, "kvpress");
    std::vector<int64_t> now;
    for (const EvalSample& s : d.samples) {
      now.push_back(s.id.index);
      EXPECT_EQ(s.context, "c" + std::to_string(s.id.index));
    }
    EXPECT_EQ(int64_t(now.size()), std::min<int64_t>(n, 200));
    EXPECT_TRUE(std::is_sorted(now.begin(), now.end()));
    EXPECT_TRUE(std::includes(now.begin(), now.end(), before.begin(), before.end()));
    before = now;
  }
}

TEST(Datasets, DamagedAndHostileLines) {
  const std::string good = Json{{"input", "a\nWhat is it?"}, {"outputs", {"1"}}}.dump();
  const std::pair<std::string, std::string> cases[] = {
      {"{\"input\": \"cut", "no JSON, or cut off"},
      {"[1, 2]", "an object is expected"},
      {std::string("{\"input\": \"\xff\"}"), "is not UTF-8"},
      {"{\"input\": " + std::string(100, '[') + std::string(100, ']') + "}", "nested 101 deep"},
      {std::string(100000, '['), "nested 100000 deep"},
      {"{\"input\": 5}", "no question"},
      {"{\"input\": \"a\\nWhat?\"}", "no answer"},
      {Json{{"input", "a\nWhat?"}, {"outputs", {std::string(70000, 'x')}}}.dump(), "an answer of 70000 bytes"},
  };
  for (const auto& [line, message] : cases) {
    const Status s = refused(write("bad/vt/validation.jsonl", good + "\n\n" + line + "\n"), "ruler");
    EXPECT_NE(s.message().find(message), std::string::npos) << s.message();
    EXPECT_NE(s.message().find("line 3 (byte " + std::to_string(good.size() + 2) + ")"), std::string::npos)
        << s.message();
  }
  // A line of 12 MB is ordinary.
  const std::string large = Json{{"input", std::string(12 << 20, 'x') + "\nWhat is it?"}, {"outputs", {"1"}}}.dump();
  EXPECT_EQ(read(write("large/vt/validation.jsonl", large + "\n" + large)).samples.size(), 2u);
  EXPECT_NE(refused(test::temp_path("data/absent")).message().find("no such file"), std::string::npos);
  EXPECT_NE(refused(write("odd/x.jsonl", "{\"a\": 1}")).message().find("is not recognised"), std::string::npos);
  fs::create_directories(test::temp_path("data/empty"));
  EXPECT_NE(refused(test::temp_path("data/empty")).message().find("has no .jsonl"), std::string::npos);
  // Names inside files are never paths.
  Json escape = {
      {"input", "q"}, {"context", "c"}, {"answers", {"a"}}, {"all_classes", nullptr}, {"dataset", "../../etc/passwd"}};
  EXPECT_NE(refused(write("escape/x.jsonl", escape.dump())).message().find("is no task of LongBench"),
            std::string::npos);
}

TEST(Datasets, GzipIsUnpackedAndItsDamageSeen) {
  const std::string line = Json{{"input", "a\nWhat is it?"}, {"outputs", {"1"}}}.dump() + "\n";
  const std::string path = test::temp_path("data/z.jsonl.gz");
  fs::create_directories(fs::path(path).parent_path());
  gzFile f = gzopen(path.c_str(), "wb");
  for (int i = 0; i < 5000; ++i) gzwrite(f, line.data(), unsigned(line.size()));
  gzclose(f);
  EXPECT_EQ(read(path, 10, "ruler").samples.size(), 10u);
  const std::string bytes = test::file_bytes(path);
  EXPECT_FALSE(refused(write("cut.jsonl.gz", bytes.substr(0, bytes.size() / 2)), "ruler").ok());
}

}  // namespace
}  // namespace longkv
