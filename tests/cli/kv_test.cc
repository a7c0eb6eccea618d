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
    for (const std::string& path : {file, other}) std::filesystem::remove(path);
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

TEST_F(KvCommand, SavingSaysWhatItWroteAsJson) {
  const auto saved = parsed(longkv_program(save({"-o", file, "--json", "--kv", "q8"})));
  EXPECT_EQ(saved["file"], file);
  EXPECT_EQ(saved["bytes"], int64_t(std::filesystem::file_size(file)));
  EXPECT_EQ(saved["kv"], "store=q8_0 + select=all");
  EXPECT_EQ(saved["tokens"], parsed(longkv_program({"kv", "info", file, "--json"}))["tokens"]);
  EXPECT_TRUE(longkv_program(save({"-o", file})).out.empty());
}

TEST_F(KvCommand, WhatPromptsShareIsNotReadAgain) {
  const Outcome first = longkv_program(run({"-p", "what is it", "--prompt-cache", file}));
  ASSERT_TRUE(succeeds(first));
  const auto prompt = parsed(first)["cost"]["prompt_tokens"].get<int64_t>();
  EXPECT_FALSE(parsed(first)["cost"].contains("restored_tokens"));
  const Outcome second = longkv_program(run({"-p", "and what is this", "--prompt-cache", file}));
  ASSERT_TRUE(succeeds(second));
  const auto cost = parsed(second)["cost"];
  // Products of f32 weights go on with the same bits where a piece of 512 tokens begins.
  EXPECT_GT(cost["restored_tokens"].get<int64_t>(), prompt - 40 - 512);
  EXPECT_LT(cost["prompt_tokens"].get<int64_t>(), 60 + 512);
  const Outcome fresh = longkv_program(run({"-p", "and what is this"}));
  EXPECT_EQ(parsed(second)["ids"], parsed(fresh)["ids"]);
  const Outcome third = longkv_program(run({"-p", "and what is this", "--prompt-cache", file}));
  ASSERT_TRUE(succeeds(third));
  EXPECT_EQ(parsed(third)["cost"]["prompt_tokens"], 0) << "the very same prompt is there as a whole";
  EXPECT_EQ(parsed(third)["ids"], parsed(fresh)["ids"]);
  // A file of other settings is a miss that is said.
  const Outcome miss = longkv_program(run({"-p", "what is it", "--prompt-cache", file, "--kv", "fp8"}));
  ASSERT_TRUE(succeeds(miss));
  EXPECT_NE(miss.err.find("belongs to other settings"), std::string::npos);
  // ... and an error where it was asked for.
  EXPECT_TRUE(refuses(longkv_program(run({"-p", "what is it", "--kv-restore", file, "--kv", "q8"})), 2,
                      "belongs to other settings"));
}

// Rows that were kept, encoded or left unread for one ending are not those of another: a cache gives the very same
// prompt back, and reads any other one; who asks for such a state is told.
TEST_F(KvCommand, ACacheNeverChangesAnAnswer) {
  for (const char* kv : {"snapkv:budget=200,window=8", "kvslimmer:budget=200", "asymkv:budget=200", "h2o:budget=200",
                         "kivi2", "a_shape:dense_layers=0,sink=128,window=256"}) {
    std::filesystem::remove(file);
    const Args ask = run({"-p", "and what is this", "--kv", kv}), other_one = run({"-p", "what is it", "--kv", kv});
    const Outcome plain = longkv_program(ask);
    ASSERT_TRUE(succeeds(plain)) << kv;
    ASSERT_TRUE(succeeds(longkv_program(join(other_one, {"--prompt-cache", file})))) << kv;
    const Outcome miss = longkv_program(join(ask, {"--prompt-cache", file}));
    ASSERT_TRUE(succeeds(miss)) << kv;
    EXPECT_NE(miss.err.find("what stays of a prompt depends on its end; the whole prompt is read"), std::string::npos)
        << miss.err;
    EXPECT_EQ(parsed(miss)["ids"], parsed(plain)["ids"]) << kv;
    EXPECT_FALSE(parsed(miss)["cost"].contains("restored_tokens")) << kv;
    const Outcome hit = longkv_program(join(ask, {"--prompt-cache", file}));
    ASSERT_TRUE(succeeds(hit)) << kv;
    EXPECT_EQ(hit.err.find("the whole prompt is read"), std::string::npos) << hit.err;
    EXPECT_EQ(parsed(hit)["ids"], parsed(plain)["ids"]) << kv;
    EXPECT_EQ(parsed(hit)["cost"]["prompt_tokens"], 0) << kv;
    EXPECT_EQ(parsed(hit)["cost"]["restored_tokens"], parsed(plain)["cost"]["prompt_tokens"]) << kv;
  }
}

TEST_F(KvCommand, ACacheOfAnIndexMadeAtThePromptsEnd) {
  for (const char* kv : {"infllm:budget=256,block=16,local=64,sink=16", "magicpig", "retroinfer"}) {
    std::filesystem::remove(file);
    ASSERT_TRUE(succeeds(longkv_program(run({"-p", "what is it", "--kv", kv, "--prompt-cache", file})))) << kv;
    const Outcome hit = longkv_program(run({"-p", "and what is this", "--kv", kv, "--prompt-cache", file}));
    ASSERT_TRUE(succeeds(hit)) << kv;
    EXPECT_GT(parsed(hit)["cost"]["restored_tokens"].get<int64_t>(), 500) << kv << hit.err;
    EXPECT_EQ(parsed(hit)["ids"], parsed(longkv_program(run({"-p", "and what is this", "--kv", kv})))["ids"]) << kv;
  }
}

// A state that continues as another prompt than it was made for says so.
TEST_F(KvCommand, AStateOfAnotherEndingIsSaid) {
  const Args kept = {"--raw", "--kv", "snapkv:budget=100,window=8", "--kv-restore", file};
  const auto raw = [&](const std::string& text, const Args& more) {
    Args args = {"run", "-m", model, "-p", text, "-n", "8", "--json", "--temp", "0", "-t", "2", "-c", "512"};
    args.insert(args.end(), more.begin(), more.end());
    return longkv_program(args);
  };
  const std::string text = file_bytes(document).substr(0, 400);
  ASSERT_TRUE(succeeds(raw(text, {"--raw", "--kv", "snapkv:budget=100,window=8", "--kv-save", file})));
  const Outcome longer = raw(text + " and what is it", kept);
  ASSERT_TRUE(succeeds(longer));
  EXPECT_NE(longer.err.find("was decided by the end of the"), std::string::npos) << longer.err;
  Args strict = kept;
  strict.push_back("--strict");
  EXPECT_TRUE(refuses(raw(text + " and what is it", strict), 2, "was decided by the end of the"));
  // The prompt that was saved is none of another ending.
  const Outcome same = raw(text, strict);
  ASSERT_TRUE(succeeds(same));
  EXPECT_EQ(parsed(same)["cost"]["prompt_tokens"], 0);
  EXPECT_EQ(parsed(same)["ids"], parsed(raw(text, {"--raw", "--kv", "snapkv:budget=100,window=8"}))["ids"]);
}

// What was read is worth an answer, also where it cannot be kept.
TEST_F(KvCommand, AFullDiskCostsNoAnswer) {
  ProgramInput full;
  full.file_limit = 4096;
  const Args ask = {"run",   "-m",  model,    "-p",     file_bytes(document).substr(0, 400),
                    "--raw", "-n",  "8",      "-t",     "2",
                    "-c",    "512", "--json", "--temp", "0"};
  const Outcome plain = longkv_program(ask);
  const Outcome cache = longkv_program(join(ask, {"--prompt-cache", file}), full);
  ASSERT_TRUE(succeeds(cache));
  EXPECT_EQ(parsed(cache)["ids"], parsed(plain)["ids"]);
  EXPECT_NE(cache.err.find("note: cannot write"), std::string::npos) << cache.err;
  EXPECT_FALSE(std::filesystem::exists(file));
  for (const Args& asked : {Args{"--kv-save", file}, Args{"--prompt-cache", file, "--strict"}}) {
    Args args = ask;
    args.insert(args.end(), asked.begin(), asked.end());
    const Outcome o = longkv_program(args, full);
    EXPECT_NE(o.exit_code, 0);
    EXPECT_NE(o.err.find("error: cannot write"), std::string::npos) << o.err;
    const auto answer = nlohmann::json::parse(o.out, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(answer.is_object()) << o.out;
    EXPECT_EQ(answer["ids"], parsed(plain)["ids"]) << "the answer comes first";
    EXPECT_FALSE(std::filesystem::exists(file));
  }
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
