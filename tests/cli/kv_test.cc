// `longkv kv` and the KV options of `longkv run`: what was saved goes on as if it had never left.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/golden.h"
#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

struct KvCommand : testing::Test {
  const std::string model = tiny_chat_model().write("kv_command.gguf");
  const std::string document = temp_path("document.txt"), file = temp_path("saved.kv"), other = temp_path("other.kv");
  void SetUp() override {
    std::ofstream out(document);
    for (int i = 0; i < 60; ++i) out << "line " << i << " of a document that is long enough to matter\n";
  }
  Args run(std::initializer_list<std::string> more) const {
    return join({"run", "-m", model, "-f", document, "-n", "12", "--json", "--temp", "0", "-t", "2", "-c", "8K"}, more);
  }
  Args save(std::initializer_list<std::string> more) const {
    return join({"kv", "save", "-m", model, "-f", document, "-t", "2", "-c", "8K"}, more);
  }
  Args restore(std::initializer_list<std::string> more) const {
    return join({"kv", "restore", "-m", model, "-n", "12", "--json", "--temp", "0", "-t", "2"}, more);
  }
};

TEST_F(KvCommand, ARestoredPromptGivesTheSameAnswer) {
  for (const char* kv : {"full", "snapkv:budget=200,window=8", "quest:block=16,budget=128"}) {
    const Args with_kv = run({"-p", "what is it", "--kv", kv});
    const Outcome plain = longkv_program(with_kv);
    ASSERT_TRUE(succeeds(plain));
    const Outcome saved = longkv_program(join(with_kv, {"--kv-save", file}));
    ASSERT_TRUE(succeeds(saved));
    EXPECT_EQ(parsed(saved)["ids"], parsed(plain)["ids"]) << kv;
    ASSERT_TRUE(std::filesystem::exists(file));
  }
}

TEST_F(KvCommand, WhatPromptsShareIsNotReadAgain) {
  const Outcome first = longkv_program(run({"-p", "what is it", "--prompt-cache", file}));
  ASSERT_TRUE(succeeds(first));
  const auto prompt = parsed(first)["cost"]["prompt_tokens"].get<int64_t>();
  EXPECT_FALSE(parsed(first)["cost"].contains("restored_tokens"));
  const Outcome second = longkv_program(run({"-p", "and what is this", "--prompt-cache", file}));
  ASSERT_TRUE(succeeds(second));
  const auto cost = parsed(second)["cost"];
  EXPECT_GT(cost["restored_tokens"].get<int64_t>(), prompt - 40);
  EXPECT_LT(cost["prompt_tokens"].get<int64_t>(), 60);
  const Outcome fresh = longkv_program(run({"-p", "and what is this"}));
  EXPECT_EQ(parsed(second)["text"], parsed(fresh)["text"]);
  // A file of other settings is a miss that is said.
  const Outcome miss = longkv_program(run({"-p", "what is it", "--prompt-cache", file, "--kv", "fp8"}));
  ASSERT_TRUE(succeeds(miss));
  EXPECT_NE(miss.err.find("belongs to other settings"), std::string::npos);
  // ... and an error where it was asked for.
  EXPECT_TRUE(refuses(longkv_program(run({"-p", "what is it", "--kv-restore", file, "--kv", "q8"})), 2,
                      "belongs to other settings"));
}

TEST_F(KvCommand, SaveInfoRestore) {
  ASSERT_TRUE(succeeds(longkv_program(save({"-o", file}))));
  ASSERT_TRUE(succeeds(longkv_program(save({"-o", other, "--compress"}))));
  EXPECT_LT(std::filesystem::file_size(other), std::filesystem::file_size(file));
  const auto info = parsed(longkv_program({"kv", "info", file, "--json"}));
  EXPECT_GT(info["tokens"].get<int64_t>(), 1000);
  EXPECT_TRUE(info["verified"].get<bool>());
  EXPECT_NE(longkv_program({"kv", "info", file}).out.find("all sums match"), std::string::npos);
  const Outcome answer = longkv_program(restore({"-i", file, "-p", "what is it"}));
  ASSERT_TRUE(succeeds(answer));
  EXPECT_EQ(parsed(answer)["cost"]["restored_tokens"], info["tokens"]);
  for (const Args& more : {Args{"-i", other}, Args{"-i", file, "--no-verify"}}) {
    Args args = restore({"-p", "what is it"});
    args.insert(args.end(), more.begin(), more.end());
    EXPECT_EQ(parsed(longkv_program(args))["ids"], parsed(answer)["ids"]);
  }
}

TEST_F(KvCommand, Mistakes) {
  ASSERT_TRUE(succeeds(longkv_program(save({"-o", file}))));
  EXPECT_TRUE(refuses(longkv_program({"kv", "info", document}), 1, "is not a KV file"));
  EXPECT_TRUE(refuses(longkv_program({"kv", "info", temp_path("none.kv")}), 1, "cannot open"));
  EXPECT_TRUE(refuses(longkv_program({"kv", "sav"}), 2, "did you mean 'save'?"));
  EXPECT_TRUE(refuses(longkv_program({"kv", "info", file, "extra"}), 2, "not expected"));
  EXPECT_TRUE(refuses(longkv_program(save({"-o", "/nowhere/x.kv"})), 1, "/nowhere"));
  EXPECT_TRUE(refuses(longkv_program(run({"-p", "x", "--prompt-cache", file, "--kv-save", other})), 2,
                      "saves and restores by itself"));
  EXPECT_TRUE(refuses(longkv_program(restore({"-i", file, "-p", "x", "-c", "64"})), 2, "use -c"));
  TinyModel another = tiny_chat_model();
  another.seed = 2;
  EXPECT_TRUE(refuses(longkv_program({"kv", "restore", "-m", another.write("another.gguf"), "-i", file, "-p", "x"}), 2,
                      "'model-hash: "));
  std::string bytes = file_bytes(file);
  bytes[bytes.size() / 2] ^= 1;
  std::ofstream(other, std::ios::binary) << bytes;
  EXPECT_TRUE(refuses(longkv_program({"kv", "info", other}), 1, "does not match its sum"));
  EXPECT_TRUE(refuses(longkv_program(restore({"-i", other, "-p", "x"})), 1, "does not match its sum"));
}

}  // namespace
}  // namespace longkv::test
