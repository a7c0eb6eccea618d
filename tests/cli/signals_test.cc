// Ctrl-C and its like: the program stops within a second, keeps what was printed, leaves no half file, and ends by the
// signal (130 in a shell).
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

namespace fs = std::filesystem;

std::string needle() { return repo_model("needle-10m-128k-f16.gguf"); }

// Long enough that no machine is done before the signal comes.
std::string long_text() { return write_temp("long.txt", std::string(100000, 'q')); }

std::string empty_dir(const std::string& name) {
  const std::string dir = temp_path(name);
  fs::remove_all(dir);
  fs::create_directory(dir);
  return dir;
}

// The time is the machine's as much as the program's: the best of three counts.
Outcome stopped(const Args& args, const ProgramInput& input) {
  Outcome o;
  for (int i = 0; i < 3; ++i) {
    o = longkv_program(args, input);
    if (o.seconds < 1.0) break;
  }
  EXPECT_LT(o.seconds, 1.0);
  EXPECT_EQ(o.signal, input.signal) << "exit code " << o.exit_code << " " << o.err;
  EXPECT_NE(o.err.find("interrupted"), std::string::npos) << o.err;
  return o;
}

TEST(CliSignals, WhileAPromptIsRead) {
  for (const char* order : {"layer", "chunk"}) {
    ProgramInput input;
    input.signal_when = [](const Outcome& o) { return o.err.find("tokens of prompt") != std::string::npos; };
    const std::string dir = empty_dir("stats");
    const Outcome o = stopped(
        {"run", "-m", needle(), "-f", long_text(), "-n", "4", "--prefill-order", order, "--stats", dir + "/s"}, input);
    EXPECT_TRUE(o.out.empty());
    EXPECT_TRUE(fs::is_empty(dir));
  }
}

TEST(CliSignals, WhileAnswering) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    ProgramInput input;
    input.signal = signal;
    input.signal_when = [](const Outcome& o) { return o.out.size() > 20; };
    const Outcome o = stopped({"run", "-m", needle(), "-p", "abc", "-n", "100000", "--ignore-eos", "-s", "1"}, input);
    EXPECT_GT(o.out.size(), 20u);
    EXPECT_EQ(o.out.back(), '\n');
    EXPECT_NE(o.err.find("answer "), std::string::npos) << "the cost is printed all the same: " << o.err;
  }
}

// What measures the machine for a share of its bandwidth may touch a gigabyte for the first time.
TEST(CliSignals, WhileAnsweringWithStatistics) {
  const std::string dir = empty_dir("statistics");
  const Args run = {"run", "-m", needle(), "-p", "abc", "-n", "100000", "--ignore-eos", "-s", "1"};
  ProgramInput input;
  input.signal_when = [](const Outcome& o) { return o.out.size() > 20; };
  stopped(join(run, {"--stats", dir + "/s"}), input);
  const auto stats = nlohmann::json::parse(file_bytes(dir + "/s"), nullptr, false);
  EXPECT_GT(stats.value("answer_tokens", 0), 20) << "the cost so far is written: " << stats;
  input.signal_when = [begin = std::chrono::steady_clock::now()](const Outcome& o) mutable {
    if (o.err.find("tokens of prompt") == std::string::npos) begin = std::chrono::steady_clock::now();
    return std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(300);
  };
  const Outcome o = stopped(join(run, {"--json"}), input);
  EXPECT_EQ(nlohmann::json::parse(o.out, nullptr, false).value("finish", ""), "interrupted") << o.out;
}

TEST(CliSignals, WhileTheMachineIsMeasured) {
  ProgramInput input;
  // A moment after what `-v` prints when the model has been read; where it prints nothing, after two seconds.
  bool printed = false;
  auto since = std::chrono::steady_clock::now();
  input.signal_when = [&](const Outcome& o) {
    const auto now = std::chrono::steady_clock::now();
    if (printed == o.err.empty()) printed = !printed, since = now;
    return now - since > std::chrono::milliseconds(printed ? 50 : 2000);
  };
  stopped({"bench", "-v", "-m", needle(), "-p", "65536", "-n", "0", "-r", "1"}, input);
}

TEST(CliSignals, WhileAQuestionIsHidden) {
  ProgramInput input;
  input.signal_when = [](const Outcome& o) { return o.err.find("tokens of prompt") != std::string::npos; };
  const std::string document = write_temp("document.txt", "a short document");
  const Outcome o = stopped(
      {"run", "-m", needle(), "--raw", "-f", document, "-p", std::string(100000, 'q'), "--hide-question", "-n", "4"},
      input);
  EXPECT_TRUE(o.out.empty());
}

TEST(CliSignals, WhileMeasuring) {
  ProgramInput input;
  input.signal_when = [](const Outcome& o) { return !o.out.empty(); };
  const Outcome o = stopped({"bench", "-m", needle(), "-p", "16", "-n", "100000", "-r", "1", "-o", "json"}, input);
  const auto rows = nlohmann::json::parse(o.out, nullptr, false);
  EXPECT_FALSE(rows.is_discarded()) << "the rows so far are a whole document: " << o.out;
  EXPECT_EQ(rows.size(), 1u);
}

TEST(CliSignals, WhileScoring) {
  for (const std::string recipe : {"full", "quest:block=16,budget=256"}) {
    const std::string dir = empty_dir("scores");
    ProgramInput input;
    input.signal_when = [](const Outcome& o) { return o.err.find("[1/") != std::string::npos; };
    stopped({"ppl", "-m", needle(), "-f", long_text(), "-c", "512", "--kv", recipe, "--kl-divergence-base", dir + "/b"},
            input);
    EXPECT_TRUE(fs::is_empty(dir));
  }
}

TEST(CliSignals, InAConversation) {
  const Args chat = {"chat", "-m", needle(), "--chat-template", "mistral", "--ignore-eos", "-s", "1"};
  ProgramInput answering;
  answering.text = "hello\n";
  answering.keep_open = true;
  answering.signal_when = [](const Outcome& o) { return o.out.size() > 20; };
  const Outcome o = stopped(chat, answering);
  EXPECT_EQ(o.out.back(), '\n');
  ProgramInput waiting = answering;
  // An answer may hold line ends too: it is over when nothing has followed one for a while.
  size_t size = 0;
  auto since = std::chrono::steady_clock::now();
  waiting.signal_when = [&](const Outcome& so_far) {
    const auto now = std::chrono::steady_clock::now();
    if (so_far.out.size() != size) since = now;
    size = so_far.out.size();
    return so_far.out.ends_with('\n') && now - since > std::chrono::milliseconds(300);
  };
  const Outcome left = longkv_program(join(chat, {"-n", "3"}), waiting);
  EXPECT_EQ(left.exit_code, 0) << "Ctrl-C at the prompt leaves: " << left.err;
  EXPECT_LT(left.seconds, 1.0);
}

// Where the rows that an interrupted turn needs to go back are gone, the next one reads the conversation again.
TEST(CliSignals, InATurnThatCannotBeTakenBack) {
  const Args chat = {"chat",
                     "-m",
                     golden("models/gemma3-linear-softcap.gguf"),
                     "--chat-template",
                     "mistral",
                     "-c",
                     "128K",
                     "-n",
                     "4",
                     "--temp",
                     "0",
                     "--ignore-eos",
                     "--json"};
  const std::string first = std::string(300, 'a') + "\n", last = "and then?\n/quit\n";
  ProgramInput typed;
  typed.terminal = true;
  typed.text = first + last;
  const Outcome plain = longkv_program(chat, typed);
  ASSERT_TRUE(succeeds(plain));
  typed.text = first + std::string(100000, 'q') + "\n" + last;
  // Once the first of six layers has read the prompt, its window is at the prompt's end.
  typed.signal_when = [](const Outcome& o) {
    const std::string line = "reading: ";
    const size_t at = o.err.rfind(line);
    return at != std::string::npos && std::atoi(o.err.c_str() + at + line.size()) > 20000;
  };
  const Outcome o = longkv_program(chat, typed);
  ASSERT_TRUE(succeeds(o)) << o.err;
  ASSERT_NE(o.err.find("is empty now"), std::string::npos) << o.err;
  const auto want = parsed_lines(plain), have = parsed_lines(o);
  ASSERT_EQ(want.size(), 2u);
  ASSERT_EQ(have.size(), 2u);
  EXPECT_EQ(have[0], want[0]);
  EXPECT_EQ(have[1]["tokens_held"], want[1]["tokens_held"]);
  EXPECT_EQ(have[1]["tokens_read"].get<int>() + 4, have[1]["tokens_held"].get<int>()) << "all of it is read";
}

TEST(CliSignals, WhatTheCallerIgnoresIsIgnored) {
  ProgramInput input;
  input.signal = input.ignored_signal = SIGHUP;
  input.signal_when = [](const Outcome& o) { return o.out.size() > 5; };
  const Outcome o =
      longkv_program({"run", "-m", needle(), "-q", "-p", "abc", "-n", "300", "--ignore-eos", "-s", "1"}, input);
  EXPECT_TRUE(succeeds(o)) << "nohup";
}

TEST(CliSignals, AReaderThatLeavesEndsTheProgramQuietly) {
  const std::string dir = empty_dir("pipe");
  const std::string text = long_text();
  ProgramInput input;
  input.close_out_early = true;
  for (const Args& args : {Args{"run", "-m", needle(), "-q", "-p", "abc", "-n", "100000", "--ignore-eos", "-s", "1",
                                "--stats", dir + "/s"},
                           Args{"tokenize", "-m", needle(), "-f", text},
                           Args{"bench", "-m", needle(), "-p", "1-200", "-n", "0", "-r", "1"}}) {
    const Outcome o = longkv_program(args, input);
    EXPECT_EQ(o.signal, SIGPIPE) << args[0] << " exit code " << o.exit_code;
    EXPECT_TRUE(o.err.empty()) << args[0] << o.err;
  }
  EXPECT_TRUE(fs::is_empty(dir));
  input.ignored_signal = SIGPIPE;
  const Outcome o = longkv_program({"tokenize", "-m", needle(), "-f", text}, input);
  EXPECT_EQ(o.exit_code, 1);
  EXPECT_NE(o.err.find("Broken pipe"), std::string::npos) << o.err;
}

TEST(CliSignals, AKilledRunLeavesNoFile) {
  const std::string dir = empty_dir("killed");
  const int nameless = ::open(dir.c_str(), O_TMPFILE | O_WRONLY, 0600);
  if (nameless < 0) GTEST_SKIP() << "this file system has no nameless files";
  ::close(nameless);
  ProgramInput input;
  input.signal = SIGKILL;
  input.signal_when = [](const Outcome& o) { return o.err.find("[1/") != std::string::npos; };
  const Outcome o = longkv_program(
      {"ppl", "-m", needle(), "-f", long_text(), "-c", "256", "--kl-divergence-base", dir + "/b"}, input);
  EXPECT_EQ(o.signal, SIGKILL);
  EXPECT_TRUE(fs::is_empty(dir));
}

}  // namespace
}  // namespace longkv::test
