// Prompt files that are no text or too long, and output files: one message, the right exit code, nothing left behind.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "support/paths.h"
#include "support/program.h"
#include "support/sanitizers.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

namespace fs = std::filesystem;

std::string model() { return TinyModel().write("model.gguf"); }

int64_t files_in(const std::string& dir) {
  return std::distance(fs::directory_iterator(dir), fs::directory_iterator());
}

std::string empty_dir(const std::string& name) {
  const std::string dir = temp_path(name);
  fs::remove_all(dir);
  fs::create_directory(dir);
  return dir;
}

// Whatever a run reads, none of its outputs may replace.
TEST(CliOutputFiles, NoInputIsWrittenOver) {
  const std::string path = model(), text = write_temp("book.txt", std::string(300, 'a') + " end");
  const std::string model_bytes = file_bytes(path), text_bytes = file_bytes(text);
  const Args run{"run", "-m", path, "-q", "--raw", "-n", "1", "--temp", "0", "-f", text};
  const Args cases[] = {
      join(run, {"--stats", path}),
      join(run, {"--stats", text}),
      join(run, {"--kv-save", path}),
      join(run, {"--kv-save", text}),
      {"kv", "save", "-m", path, "-q", "--raw", "-f", text, "-o", path},
      {"kv", "save", "-m", path, "-q", "--raw", "-f", text, "-o", text},
      {"ppl", "-m", path, "-q", "-c", "64", "-f", text, "--kl-divergence-base", text},
  };
  for (const Args& args : cases) {
    const Outcome outcome = longkv_program(args);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.err;
    EXPECT_NE(outcome.err.find("name another file for the output"), std::string::npos) << outcome.err;
    EXPECT_EQ(file_bytes(path), model_bytes);
    EXPECT_EQ(file_bytes(text), text_bytes);
  }
  const std::string mask = write_temp("mask.gguf", file_bytes(repo_model("needle-10m-128k-leank28.gguf")));
  const std::string mask_bytes = file_bytes(mask);
  for (const char* output : {"--picture", "--export"}) {
    EXPECT_EQ(longkv_program({"inspect", "-m", mask, output, mask}).exit_code, 2);
    EXPECT_EQ(file_bytes(mask), mask_bytes);
  }
  // A prompt cache replaces states of longkv's alone.
  EXPECT_EQ(longkv_program(join(run, {"--prompt-cache", path})).exit_code, 1);
  const std::string other = write_temp("notes.txt", "what someone wrote");
  EXPECT_EQ(longkv_program(join(run, {"--prompt-cache", other})).exit_code, 1);
  EXPECT_EQ(file_bytes(other), "what someone wrote");
  EXPECT_EQ(file_bytes(path), model_bytes);
  EXPECT_TRUE(succeeds(longkv_program(join(run, {"--prompt-cache", write_temp("empty.kv", "")}))));
}

TEST(CliOutputFiles, APipeThatNobodyReadsIsRefused) {
  const std::string pipe = temp_path("pipe");
  fs::remove(pipe);
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_TRUE(refuses(longkv_program({"run", "-m", model(), "-q", "--raw", "-n", "1", "-p", "a", "--stats", pipe}), 1,
                      "a pipe that nobody reads"));
  EXPECT_TRUE(fs::is_fifo(pipe));
}

// What is mapped, or read more than once, is a file. A pipe would be waited for, with signals set aside by then.
TEST(CliOutputFiles, APipeIsNoFile) {
  const std::string pipe = temp_path("kept.pipe"), path = model();
  fs::remove(pipe);
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const Args run = {"run", "-m", path, "-q", "--raw", "-n", "1", "-p", "abc", "-t", "1"};
  const Args cases[] = {join(run, {"--prompt-cache", pipe}),
                        join(run, {"--kv-save", pipe}),
                        join(run, {"--kv-restore", pipe}),
                        join(run, {"--kv", "duo:gates=" + pipe}),
                        join(run, {"--kv", "index=labels(file=" + pipe + ") + select=topk"}),
                        join(run, {"--kv", "leank:mask=" + pipe})};
  for (const bool others : {false, true}) {
    // With a reader and a writer at its other end every open would succeed, and reading wait.
    const int fd = others ? ::open(pipe.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC) : -1;
    for (const Args& args : cases) {
      const Outcome o = longkv_program(args);
      EXPECT_TRUE(refuses(o, 1, "not a regular file")) << args.back();
      EXPECT_LT(o.seconds, 20) << args.back();
    }
    if (fd >= 0) ::close(fd);
  }
  EXPECT_TRUE(fs::is_fifo(pipe));
}

// A terminal would obey what a hostile file brings into a message.
TEST(CliOutput, ControlCharactersOfFilesAreEscaped) {
  const std::string gates = write_temp("gates.tsv", std::string("\x1b]0;title\x07\0more\n", 15));
  const Outcome outcome =
      longkv_program({"run", "-m", model(), "-q", "--raw", "-n", "1", "-p", "a", "--kv", "duo:gates=" + gates});
  EXPECT_TRUE(refuses(outcome, 2, "\\x1b]0;title\\x07"));
  EXPECT_NE(outcome.err.find("is not a number"), std::string::npos);
  EXPECT_EQ(outcome.err.find('\x1b'), std::string::npos);
}

TEST(CliPromptFiles, WhatIsNoTextIsRefused) {
  const std::string path = model();
  struct Case {
    std::string content;
    std::string message;
  };
  const Case cases[] = {
      {"", "is empty"},
      {std::string("\x7f"
                   "ELF\x02\x01\xff\x00",
                   8),
       "is not UTF-8: byte 0xff at offset 6"},
      {"caf\xe9 noir", "offset 3"},
      {"cut \xe2\x82", "offset 4"},
      {"surrogate \xed\xa0\x80", "offset 10"},
      {"overlong \xc0\xaf", "offset 9"},
      {std::string("U\0T\0F\0", 6), "binary or UTF-16, not UTF-8 text: byte 0 at offset 1"},
  };
  for (const Case& c : cases) {
    const std::string file = write_temp("prompt.txt", c.content);
    EXPECT_TRUE(refuses(longkv_program({"run", "-m", path, "-q", "-n", "2", "-f", file}), 2, c.message));
    EXPECT_TRUE(refuses(longkv_program({"ppl", "-m", path, "-q", "-c", "8", "-f", file}), 2, c.message));
    ProgramInput piped;
    piped.text = c.content;
    EXPECT_TRUE(refuses(longkv_program({"run", "-m", path, "-q", "-n", "2", "-f", "-"}, piped), 2, c.message));
    if (c.content.empty()) continue;  // of which the tokens are none
    EXPECT_TRUE(refuses(longkv_program({"tokenize", "-m", path, "-f", file}), 2, c.message));
  }
  EXPECT_TRUE(refuses(longkv_program({"run", "-m", path, "-q", "-n", "2", "-p", "caf\xe9"}), 2, "-p is not UTF-8"));
  EXPECT_TRUE(refuses(longkv_program({"run", "-m", path, "-q", "-f", temp_path("absent.txt")}), 1, "No such file"));
  EXPECT_TRUE(refuses(longkv_program({"run", "-m", path, "-q", "-f", fs::temp_directory_path()}), 1, "directory"));
  ProgramInput piped;
  piped.text = "a text from a pipe";
  const Outcome from_pipe =
      longkv_program({"run", "-m", path, "-q", "-n", "4", "--temp", "0", "--ignore-eos", "-f", "-"}, piped);
  EXPECT_TRUE(succeeds(from_pipe));
  EXPECT_EQ(from_pipe.out, longkv_program({"run", "-m", path, "-q", "-n", "4", "--temp", "0", "--ignore-eos", "-f",
                                           write_temp("prompt.txt", piped.text)})
                               .out);
  EXPECT_EQ(longkv_program({"tokenize", "-m", path, "--ids", "-f", "-"}, piped).out.substr(0, 6), "97 32 ");
}

TEST(CliPromptFiles, WhatNeverEndsIsRefusedAtOnce) {
  for (const char* command : {"run", "tokenize"}) {
    const Outcome o = longkv_program({command, "-m", model(), "-f", "/dev/zero"});
    EXPECT_TRUE(refuses(o, 2, "'/dev/zero' is binary or UTF-16"));
    EXPECT_LT(o.seconds, 5) << "it would take gigabytes of memory";
  }
}

// What a document says is text in every command, also where it looks like a model's own markers.
TEST(CliPromptFiles, MarkersInADocumentAreText) {
  const std::string path = tiny_chat_model().write("chat.gguf");
  const std::string file = write_temp("markers.txt", "<|im_end|><|im_end|>");
  EXPECT_TRUE(refuses(longkv_program({"ppl", "-m", path, "-q", "-c", "64", "-f", file}), 2, "has 20 tokens"));
  EXPECT_TRUE(refuses(longkv_program({"eval-kv", "-m", path, "-q", "-n", "30", "-f", file}), 2, "has 20 tokens"));
}

TEST(CliPromptFiles, TooLongIsNeverCutUnasked) {
  const std::string path = write_temp("long.txt", std::string(400, 'a') + std::string(400, 'z'));
  const Args base = {"run", "-m", model(), "-c", "128", "-n", "8", "-t", "1", "-f", path, "-p", "QQ"};
  EXPECT_TRUE(refuses(longkv_program(base), 2, "the prompt has 802 tokens and 120 fit beside the answer"));
  EXPECT_TRUE(refuses(longkv_program(base), 2, "--keep-first"));
  const auto seen = [&](const std::string& flag) {
    const Outcome o = longkv_program(join(base, {flag, "--verbose-prompt"}));
    EXPECT_TRUE(succeeds(o));
    EXPECT_NE(o.err.find("of 800 document tokens, as asked"), std::string::npos) << o.err;
    EXPECT_NE(o.err.find("QQ\n"), std::string::npos) << "the question is never cut: " << o.err;
    return o.err;
  };
  const std::string first = seen("--keep-first");
  EXPECT_NE(first.find(std::string(100, 'a')), std::string::npos);
  EXPECT_EQ(first.find('z'), first.rfind('z')) << first;
  const std::string last = seen("--keep-last");
  EXPECT_NE(last.find(std::string(100, 'z')), std::string::npos);
  EXPECT_EQ(last.find("aaaa"), std::string::npos) << last;
  // Exactly as long as fits, and one token more.
  const std::string fits = write_temp("fits.txt", std::string(118, 'a'));
  const Args exact = {"run", "-m", model(), "-q", "-c", "128", "-n", "8", "-f", fits};
  EXPECT_TRUE(succeeds(longkv_program(join(exact, {"-p", "QQ"}))));
  EXPECT_TRUE(refuses(longkv_program(join(exact, {"-p", "QQQ"})), 2, "has 121 tokens and 120 fit"));
  EXPECT_TRUE(refuses(longkv_program({"run", "-m", model(), "-q", "-c", "128", "-n", "8", "-f", fits, "-p",
                                      std::string(121, 'Q'), "--keep-last"}),
                      2, "everything but the document already takes 121"));
}

TEST(CliPromptFiles, ACutNeverLeavesHalfACharacter) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "\xe2\x82\xac";  // three bytes, three tokens
  const std::string path = write_temp("euro.txt", text);
  for (const char* flag : {"--keep-first", "--keep-last"}) {
    for (const char* context : {"126", "127", "128"}) {
      const Outcome o = longkv_program(
          {"run", "-m", model(), "-c", context, "-n", "8", "-f", path, "-p", "Q", flag, "--verbose-prompt"});
      EXPECT_TRUE(succeeds(o));
      EXPECT_EQ(o.err.find("\xef\xbf\xbd"), std::string::npos) << o.err;
      EXPECT_NE(o.err.find("\xe2\x82\xac"), std::string::npos) << o.err;
    }
  }
}

TEST(CliOutputFiles, AFailedRunLeavesNoFile) {
  const std::string text = write_temp("score.txt", std::string(600, 'b'));
  const std::string dir = empty_dir("out");
  const std::string path = model();
  EXPECT_EQ(longkv_program({"run", "-m", path, "-f", text, "-c", "32", "-n", "2", "--stats", dir + "/s"}).exit_code, 2);
  EXPECT_EQ(longkv_program({"ppl", "-m", path, "-f", text, "-c", "1000", "--kl-divergence-base", dir + "/l"}).exit_code,
            2);
  // A model that computes nonsense fails after the file was begun.
  TinyModel broken;
  broken.mistakes["output_norm.weight"].first_value = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(longkv_program({"ppl", "-m", broken.write("broken.gguf"), "-q", "-f", text, "-c", "64",
                            "--kl-divergence-base", dir + "/l"})
                .exit_code,
            1);
  EXPECT_EQ(files_in(dir), 0);
  const Args run = {"run", "-m", path, "-p", "x", "-n", "1", "--stats"};
  EXPECT_TRUE(refuses(longkv_program(join(run, {dir})), 1, "directory"));
  EXPECT_TRUE(refuses(longkv_program(join(run, {dir + "/no/s"})), 1, "No such file"));
  EXPECT_TRUE(refuses(longkv_program(join(run, {dir + "/" + std::string(300, 'n')})), 1, "name too long"));
  EXPECT_EQ(files_in(dir), 0);
  // What is committed stands under its name alone, also a name as long as names may be; another run replaces it.
  const std::string longest = dir + "/" + std::string(255, 'n');
  EXPECT_TRUE(succeeds(longkv_program(join(run, {longest}))));
  const std::string before = file_bytes(longest);
  EXPECT_TRUE(succeeds(longkv_program(join(run, {longest}))));
  EXPECT_EQ(files_in(dir), 1);
  EXPECT_EQ(before.front(), '{');
  EXPECT_EQ(file_bytes(longest).front(), '{');
  struct stat st {};
  ASSERT_EQ(::stat(longest.c_str(), &st), 0);
  const mode_t mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(st.st_mode & 0777, 0666 & ~mask) << "as any file that the user makes";
}

// Wherever memory runs out, in whatever thread, it is said as such.
TEST(CliMemory, AnyLimitIsAnErrorInWords) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer reserves more than any limit";
  const std::string path = model(), text = write_temp("score.txt", std::string(300, 'b'));
  for (const Args& args : {Args{"run", "-m", path, "-q", "--raw", "-t", "2", "-n", "4", "-f", text},
                           Args{"tokenize", "-m", path, "-f", write_temp("large.txt", std::string(4000000, 'c'))}}) {
    int failed = 0;
    bool starts = false;
    for (int64_t limit = 48; limit < 220; limit += 2) {
      ProgramInput input;
      input.memory_limit = limit << 20;
      starts = starts || longkv_program({"--help"}, input).exit_code == 0;
      if (!starts) continue;  // not even its libraries find room
      const Outcome o = longkv_program(args, input);
      if (o.exit_code == 0) break;
      ++failed;
      EXPECT_EQ(o.exit_code, 1) << limit << " MiB, signal " << o.signal << ": " << o.err;
      EXPECT_NE(o.err.find("error: "), std::string::npos) << limit << " MiB: " << o.err;
      EXPECT_EQ(o.err.find("internal"), std::string::npos) << limit << " MiB: " << o.err;
    }
    EXPECT_GT(failed, 0) << args[0];
  }
}

TEST(CliOutputFiles, AFullDiskIsAnErrorAndLeavesNoFile) {
  const std::string text = write_temp("score.txt", std::string(600, 'b'));
  const std::string dir = empty_dir("full");
  write_temp("full/old", "what was there before");
  ProgramInput small;
  small.file_limit = 4096;  // the program's output file is far below, the logits are far above
  for (const std::string name : {"new", "old"}) {
    const Outcome o = longkv_program(
        {"ppl", "-m", model(), "-q", "-f", text, "-c", "64", "--kl-divergence-base", dir + "/" + name}, small);
    EXPECT_TRUE(refuses(o, 1, "File too large"));
    EXPECT_NE(o.err.find(dir + "/" + name), std::string::npos) << o.err;
  }
  EXPECT_EQ(files_in(dir), 1);
  EXPECT_EQ(file_bytes(dir + "/old"), "what was there before");
}

TEST(CliOutputFiles, AFullDeviceIsAnError) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  const std::string text = write_temp("score.txt", std::string(600, 'b'));
  const std::string path = model();
  ProgramInput full;
  full.out_path = "/dev/full";
  for (const Args& args :
       {Args{"version"}, Args{"--help"}, Args{"run", "--help"}, Args{"inspect", "-m", path},
        Args{"tokenize", "-m", path, "-p", "abc"}, Args{"plan", "-m", path},
        Args{"run", "-m", path, "-p", "x", "-n", "4", "--ignore-eos"}, Args{"run", "-m", path, "-p", "x", "--json"},
        Args{"ppl", "-m", path, "-f", text, "-c", "64"}, Args{"bench", "-m", path, "-p", "8", "-n", "1", "-r", "1"}}) {
    const Outcome o = longkv_program(args, full);
    EXPECT_EQ(o.exit_code, 1) << args[0] << o.err;
    EXPECT_NE(o.err.find("No space left"), std::string::npos) << args[0] << o.err;
  }
  // Devices are written in place, never replaced by a file.
  for (const Args& args :
       {Args{"run", "-m", path, "-q", "-p", "x", "-n", "1", "--stats", "/dev/full"},
        Args{"ppl", "-m", path, "-q", "-f", text, "-c", "64", "--kl-divergence-base", "/dev/full"}}) {
    const Outcome o = longkv_program(args);
    EXPECT_EQ(o.exit_code, 1) << o.err;
    EXPECT_NE(o.err.find("No space left"), std::string::npos) << o.err;
    struct stat st {};
    ASSERT_EQ(::stat("/dev/full", &st), 0);
    ASSERT_TRUE(S_ISCHR(st.st_mode));
  }
}

TEST(CliOutputFiles, AClosedOutputIsAnError) {
  ProgramInput input;
  input.close_out = true;
  EXPECT_EQ(longkv_program({"version"}, input).exit_code, 1);
  // The number of the closed stream must not go to the file that is being written.
  const std::string stats = temp_path("closed.json");
  const Outcome o = longkv_program({"run", "-m", model(), "-p", "x", "-n", "4", "--stats", stats}, input);
  EXPECT_EQ(o.exit_code, 1) << o.err;
  EXPECT_FALSE(fs::exists(stats));
}

}  // namespace
}  // namespace longkv::test
