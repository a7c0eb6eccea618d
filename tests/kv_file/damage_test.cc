// Files that are cut, damaged or belong to something else are refused with the reason, and the session stays as it was.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/atomic_file.h"
#include "kv_file/harness.h"
#include "prefill/assignment.h"

namespace longkv {
namespace {

using test::make;
using test::random_ids;
using test::tiny;

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

struct Damage : testing::Test {
  ThreadPool pool{2};
  std::shared_ptr<const LoadedModel> model = tiny("llama");
  const std::string good = test::temp_path("good.kv"), bad = test::temp_path("bad.kv");
  std::unique_ptr<Session> session;  // holds other tokens
  std::vector<float> before;

  std::string save(const std::string& kv, int64_t n) {
    auto s = make(model, kv, pool);
    EXPECT_TRUE(s->prefill(random_ids(n, model->config().vocab)).ok());
    EXPECT_TRUE(save_session(*s, good).ok());
    session = make(model, kv, pool);
    EXPECT_TRUE(session->prefill(random_ids(50, model->config().vocab, 7)).ok());
    before.assign(session->logits().begin(), session->logits().end());
    return test::file_bytes(good);
  }
  // The message; empty when the file was taken.
  std::string restore(const std::string& bytes, Code* code = nullptr) {
    write_bytes(bad, bytes);
    const auto result = restore_session(*session, bad);
    if (code != nullptr) *code = result.status().code();
    return result.ok() ? "" : result.status().message();
  }
  void expect_untouched() {
    EXPECT_EQ(session->tokens(), 50);
    EXPECT_TRUE(std::ranges::equal(session->logits(), before));
    auto fresh = make(model, session->kv().recipe().canonical(), pool);
    ASSERT_TRUE(fresh->prefill(random_ids(50, model->config().vocab, 7)).ok());
    const auto more = random_ids(9, model->config().vocab, 3);
    for (const int32_t id : more) {
      ASSERT_TRUE(session->decode(id).ok());
      ASSERT_TRUE(fresh->decode(id).ok());
      ASSERT_TRUE(std::ranges::equal(session->logits(), fresh->logits()));
    }
  }
};

TEST_F(Damage, EveryLengthIsRefused) {
  const std::string bytes = save("quest:block=16,budget=64,dense_layers=0", 70);
  std::vector<size_t> lengths;
  for (size_t n = 0; n < 300; ++n) lengths.push_back(n);
  for (size_t n = 300; n < bytes.size(); n += 509) lengths.push_back(n);
  for (size_t n = bytes.size() - 300; n < bytes.size(); ++n) lengths.push_back(n);
  for (const size_t n : lengths) {
    Code code = Code::kOk;
    const std::string message = restore(bytes.substr(0, n), &code);
    ASSERT_FALSE(message.empty()) << n;
    ASSERT_EQ(code, Code::kCorrupt) << n << ": " << message;
  }
  EXPECT_NE(restore(bytes.substr(0, 0)).find("has 0 bytes"), std::string::npos);
  EXPECT_NE(restore(bytes.substr(0, bytes.size() - 1)).find("footer"), std::string::npos);
  EXPECT_FALSE(restore(bytes + std::string(64, '\0')).empty());
  expect_untouched();
  EXPECT_EQ(restore(bytes), "");
}

TEST_F(Damage, EveryFlippedByteIsRefused) {
  const std::string bytes = save("snapkv:budget=40,window=8", 70);
  // All of header, small segments and the end; some of every page.
  std::vector<size_t> places;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool dense = i < 4096 || i + 6000 > bytes.size();
    if (dense ? i % 3 == 0 : i % 251 == 0) places.push_back(i);
  }
  for (const size_t i : places) {
    std::string damaged = bytes;
    damaged[i] = char(damaged[i] ^ (1 << i % 8));
    ASSERT_FALSE(restore(damaged).empty()) << "byte " << i << " of " << bytes.size();
  }
  expect_untouched();
  EXPECT_EQ(restore(bytes), "");
}

TEST_F(Damage, WithoutVerificationOnlyMappedRowsAreTrusted) {
  const std::string bytes = save("full", 70);
  const auto file = *KvFile::open(good);
  const KvEntry* rows = file->find("kv.cache.l0.h0.k");
  const KvEntry* tokens = file->find("tokens");
  ASSERT_TRUE(rows != nullptr && tokens != nullptr);
  for (const KvEntry* entry : {rows, tokens}) {
    std::string damaged = bytes;
    damaged[entry->offset + 5] ^= 1;
    write_bytes(bad, damaged);
    auto s = make(model, "full", pool);
    EXPECT_FALSE(restore_session(*s, bad).ok());
    EXPECT_EQ(restore_session(*s, bad, {.verify = false}).ok(), entry == rows);
  }
}

TEST_F(Damage, NoFileOrAnotherKindOfFile) {
  save("full", 20);
  const auto missing = restore_session(*session, test::temp_path("missing.kv"));
  EXPECT_EQ(missing.status().code(), Code::kIo);
  EXPECT_EQ(restore_session(*session, std::filesystem::temp_directory_path().string()).status().code(), Code::kIo);
  const auto gguf = restore_session(*session, test::tiny_model("llama"));
  EXPECT_NE(gguf.status().message().find("is not a KV file"), std::string::npos);
  expect_untouched();
}

TEST_F(Damage, OtherSettingsAreRefusedByName) {
  save("full", 100);
  const auto refused = [&](Session& s) {
    const auto result = restore_session(s, good);
    EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(s.tokens(), 0);
    return result.ok() ? "" : result.status().message();
  };
  const auto has = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  has(refused(*make(tiny("qwen3"), "full", pool)), "'model");
  has(refused(*make(model, "fp8", pool)), "'kv: ");
  has(refused(*make(model, "quest", pool)), "'kv: ");
  has(refused(*make(model, "full", pool, 99)), "use -c 100 or more");
  SessionOptions o;
  o.context = 512;
  o.recipe = *parse_recipe("full");
  o.products = ProductType::kF32;
  has(refused(**Session::create(model, o, pool)), "'products: int8', this run has 'products: f32'");
  // The same tensors and names, other rotation.
  RopeOverrides rope;
  rope.base = 12345.0;
  const auto turned = LoadedModel::load(test::tiny_model("llama"), rope);
  ASSERT_TRUE(turned.ok());
  has(refused(*make(*turned, "full", pool)), "'rope: ");
}

// A recipe names its files by their paths; what they hold decides the rows.
TEST_F(Damage, AnotherAssignmentUnderTheSameNameIsRefused) {
  const std::string path = test::temp_path("assignment.json");
  const auto assign = [&](PrefillKind kind) {
    const std::vector<HeadPattern> heads(size_t(model->config().heads), HeadPattern{kind, 64, 64});
    write_bytes(path, write_assignment(PatternAssignment(size_t(model->config().layers), heads), {}));
  };
  const std::string kv = "minference:file=\"" + path + "\",dense_layers=0";
  assign(PrefillKind::kAShape);
  save(kv, 100);
  EXPECT_TRUE(restore_session(*make(model, kv, pool), good).ok());
  assign(PrefillKind::kVerticalSlash);
  const auto refused = restore_session(*make(model, kv, pool), good);
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("'kv-files: "), std::string::npos) << refused.status().message();
}

TEST_F(Damage, RandomRowsHaveNoTokensToSave) {
  auto s = make(model, "full", pool);
  ASSERT_TRUE(s->kv().fill_random(40, 1).ok());
  const std::string path = test::temp_path("random_rows.kv");
  EXPECT_EQ(save_session(*s, path).status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Damage, AFileThatCannotBeWrittenLeavesTheOldOne) {
  const std::string bytes = save("full", 100);
  auto s = make(model, "full", pool);
  ASSERT_TRUE(s->prefill(random_ids(30, model->config().vocab)).ok());
  EXPECT_EQ(save_session(*s, test::temp_path("no/such/folder.kv")).status().code(), Code::kIo);
  EXPECT_EQ(test::file_bytes(good), bytes);
  ASSERT_TRUE(save_session(*s, good).ok());
  EXPECT_NE(test::file_bytes(good), bytes);
}

// The program is killed after any number of written bytes: the earlier file stays, and nothing else does.
TEST_F(Damage, AKillInTheMiddleOfASaveLosesNothing) {
  const std::string before_kill = save("full", 100);
  auto s = make(model, "full", pool);
  ASSERT_TRUE(s->prefill(random_ids(200, model->config().vocab, 3)).ok());
  const auto folder = std::filesystem::path(good).parent_path();
  const auto files = [&] {
    int64_t n = 0;
    for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(folder)) ++n;
    return n;
  };
  const int64_t files_before = files();
  for (const uint64_t limit : {0, 1, 64, 5000, 20000, 40000}) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      auto file = AtomicFile::create(good);
      uint64_t written = 0;
      KvFileWriter writer(
          [&](std::span<const uint8_t> bytes) {
            written += bytes.size();
            if (written > limit) ::kill(::getpid(), SIGKILL);
            return file->write(bytes);
          },
          {});
      (void)write_session(*s, writer);
      (void)writer.finish();
      ::_exit(0);  // never reached: all limits are below the file's size
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << limit;
    EXPECT_EQ(test::file_bytes(good), before_kill);
    EXPECT_EQ(files(), files_before);
    ASSERT_TRUE(restore_session(*make(model, "full", pool), good).ok());
  }
}

}  // namespace
}  // namespace longkv
