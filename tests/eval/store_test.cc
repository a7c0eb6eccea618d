// Results on disk: what a kill may leave behind, what must be refused, and that nothing is lost or repeated.
#include "eval/store.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "eval/summary.h"
#include "support/paths.h"
#include "support/program.h"

namespace longkv {
namespace {

namespace fs = std::filesystem;

std::string fresh(const std::string& name) {
  const std::string dir = test::temp_path(name);
  fs::remove_all(dir);
  return dir;
}

EvalRunInfo run_info() {
  EvalRunInfo info;
  info["format"] = EvalStore::kFormat;
  info["model_hash"] = "abc";
  info["seed"] = 1;
  info["note"]["threads"] = 2;
  return info;
}

EvalRecord record(int64_t index, const std::string& kv = "full", double score = 1) {
  EvalRecord r;
  r.suite = "longkv";
  r.task = "passkey";
  r.length = 4096;
  r.depth = 50;
  r.index = index;
  r.seed = 0xffffffffffffffffu;
  r.kv = r.label = kv;
  r.question = "hidden";
  r.metric = "first_integer";
  r.score = score;
  r.text = "7 \"quoted\" \n \xff and \xe2\x82\xac";
  r.references = {"7", "8"};
  r.layer_mass = {0.5, 1};
  r.kl_mean = 0.25;
  r.compared = 3;
  return r;
}

void append_raw(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::app | std::ios::binary) << text;
}

TEST(EvalStore, RecordsComeBack) {
  const std::string dir = fresh("store");
  {
    auto store = EvalStore::open(dir, run_info());
    ASSERT_TRUE(store.ok()) << store.status().message();
    ASSERT_TRUE(store->append(record(0)).ok());
    ASSERT_TRUE(store->append(record(1, "quest", 0.5)).ok());
  }
  auto store = EvalStore::open(dir, run_info());
  ASSERT_TRUE(store.ok()) << store.status().message();
  ASSERT_EQ(store->records().size(), 2u);
  const EvalRecord& r = store->records()[1];
  EXPECT_EQ(r.score, 0.5);
  EXPECT_EQ(r.seed, 0xffffffffffffffffu);
  EXPECT_EQ(r.references, (std::vector<std::string>{"7", "8"}));
  EXPECT_EQ(r.layer_mass, (std::vector<double>{0.5, 1}));
  EXPECT_EQ(r.text, "7 \"quoted\" \n \xef\xbf\xbd and \xe2\x82\xac");
  EXPECT_TRUE(store->has(record(1, "quest").key()));
  EXPECT_FALSE(store->has(record(2).key()));
  EXPECT_EQ(record(1, "quest").to_json().size(), r.to_json().size());
}

TEST(EvalStore, ATornLastLineIsRemovedWhereverItWasTorn) {
  const std::string dir = fresh("torn"), path = dir + "/samples.jsonl";
  {
    auto store = EvalStore::open(dir, run_info());
    ASSERT_TRUE(store.ok());
    ASSERT_TRUE(store->append(record(0)).ok());
  }
  const std::string whole = test::file_bytes(path);
  const std::string next = record(1).to_json().dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  for (size_t n = 1; n <= next.size(); n += 37) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole << next.substr(0, n);
    EXPECT_EQ(EvalStore::read(dir)->records().size(), 1u);
    EXPECT_EQ(test::file_bytes(path).size(), whole.size() + n) << "a reader changes nothing";
    auto store = EvalStore::open(dir, run_info());
    ASSERT_TRUE(store.ok()) << store.status().message();
    EXPECT_EQ(store->records().size(), 1u);
    EXPECT_EQ(test::file_bytes(path), whole);
    ASSERT_TRUE(store->append(record(1)).ok());
  }
}

TEST(EvalStore, ADamagedLineIsNamed) {
  const std::string dir = fresh("damaged"), path = dir + "/samples.jsonl";
  {
    auto store = EvalStore::open(dir, run_info());
    ASSERT_TRUE(store->append(record(0)).ok());
  }
  const std::string whole = test::file_bytes(path);
  const std::string wrong_type =
      record(1).to_json().dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  const std::pair<std::string, std::string> cases[] = {
      {"{\"task\": 3}\n", "field \"suite\" is missing"},
      {"nonsense\n", "no JSON"},
      {"\n", "no JSON"},
      {"[1]\n", "an object is expected"},
      {std::string(wrong_type).replace(wrong_type.find("\"score\":1.0"), 11, "\"score\":\"\"") + "\n",
       "field \"score\" is of another type"},
  };
  for (const auto& [line, message] : cases) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole << line << whole;
    const auto store = EvalStore::open(dir, run_info());
    EXPECT_EQ(store.status().code(), Code::kCorrupt) << line;
    EXPECT_NE(store.status().message().find(message), std::string::npos) << store.status().message();
    EXPECT_NE(store.status().message().find("line 2 (byte " + std::to_string(whole.size()) + ")"), std::string::npos)
        << store.status().message();
    EXPECT_EQ(test::file_bytes(path), whole + line + whole) << "left as it was";
  }
}

TEST(EvalStore, AnotherRunIsRefused) {
  const std::string dir = fresh("other");
  { ASSERT_TRUE(EvalStore::open(dir, run_info())->append(record(0)).ok()); }
  EvalRunInfo other = run_info();
  other["model_hash"] = "def";
  auto refused = EvalStore::open(dir, other);
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("\"model_hash\" is \"abc\" there and \"def\" now"), std::string::npos)
      << refused.status().message();
  other = run_info();
  other["note"]["threads"] = 9;
  EXPECT_TRUE(EvalStore::open(dir, other).ok()) << "notes may differ";
  other = run_info();
  other["format"] = EvalStore::kFormat + 1;
  std::ofstream(dir + "/run.json") << other.dump();
  EXPECT_NE(
      EvalStore::open(dir, run_info()).status().message().find(fmt::format("is of format {}", EvalStore::kFormat + 1)),
      std::string::npos);
  std::ofstream(dir + "/run.json") << "{";
  EXPECT_EQ(EvalStore::open(dir, run_info()).status().code(), Code::kCorrupt);
  fs::remove(dir + "/run.json");
  EXPECT_NE(EvalStore::open(dir, run_info()).status().message().find("without run.json"), std::string::npos);
  EXPECT_EQ(EvalStore::read(dir).status().code(), Code::kIo);
}

TEST(EvalStore, OneWriterAtATime) {
  const std::string dir = fresh("locked");
  auto first = EvalStore::open(dir, run_info());
  ASSERT_TRUE(first.ok());
  const auto second = EvalStore::open(dir, run_info());
  EXPECT_NE(second.status().message().find("another process"), std::string::npos);
}

TEST(EvalStore, FoldersThatCannotBeWritten) {
  const std::string file = test::temp_path("a_file");
  append_raw(file, "x");
  EXPECT_EQ(EvalStore::open(file + "/below", run_info()).status().code(), Code::kIo);
  if (::geteuid() != 0) {
    const std::string dir = fresh("readonly");
    fs::create_directory(dir);
    ::chmod(dir.c_str(), 0555);
    EXPECT_EQ(EvalStore::open(dir, run_info()).status().code(), Code::kIo);
  }
}

TEST(EvalSummary, ComparesOnTheSamePrompts) {
  std::vector<EvalRecord> records;
  for (int64_t i = 0; i < 6; ++i) {
    records.push_back(record(i, "full", 1));
    records.push_back(record(i, "quest", i < 2 ? 0 : 1));
    records.push_back(record(i, "full@threads=1", 1));
  }
  records[4].skipped = "too long";  // quest #1
  records[0].skipped = "";
  const Summary s = summarise(records);
  ASSERT_EQ(s.rows.size(), 3u);
  EXPECT_EQ(s.rows[0].label, "full");
  EXPECT_EQ(s.rows[1].label, "full@threads=1") << "the noise floor stands beside full attention";
  const SummaryRow& quest = s.rows[2];
  EXPECT_EQ(quest.skipped, 1);
  EXPECT_EQ(quest.score.n, 5);
  EXPECT_NEAR(quest.score.mean, 0.8, 1e-12);
  EXPECT_EQ(quest.against_full.worse, 1);
  EXPECT_EQ(quest.against_full.better, 0);
  EXPECT_NEAR(quest.kl_mean, 0.25, 1e-12);
  EXPECT_NEAR(s.totals[2].largest_drop, 0.2, 1e-12);
  const std::string csv = summary_csv(s);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 4);
  EXPECT_NE(summary_text(s).find("| quest"), std::string::npos);
}

}  // namespace
}  // namespace longkv
