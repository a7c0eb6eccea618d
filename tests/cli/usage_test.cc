// Wrong usage ends with exit code 2 and one message that names the mistake; help; notices and --strict.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/disk_space.h"
#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

std::string line_of(const Args& args) {
  std::string line;
  for (const std::string& a : args) line += a + " ";
  return line;
}

std::string needle() { return repo_model("needle-10m-128k-f16.gguf"); }

constexpr const char* kConfig =
    "long_context:\n  chunk_size: 64\n  max_seq_len: 400\n  block_size: 32\n  local_windows_len: 64\n"
    "  second_select_num: 2\n  threads_num: 1\n  anchor_type: QUEST\n  anchor_num: 2\n  kv_type: FP16\n"
    "  dense_layer_num: 0\n  preselect_block: false\n  preselect_block_count: 0\n  head_select_mode: SEPARATE\n  "
    "layer_step: 1\n  token_step: 1\n";

TEST(CliUsage, WrongUsageIsNamedAndPrintsNothing) {
  const std::string model = TinyModel().write("model.gguf");
  const std::string text = write_temp("usage.txt", "some text to read");
  const std::string config = write_temp("config.yaml", kConfig);
  struct Case {
    Args args;
    std::string message;
  };
  const Args run = {"run", "-m", model, "-p", "x"};
  const Args bench = {"bench", "-m", model, "-p", "0"};
  const Args ppl = {"ppl", "-m", model};
  const Case cases[] = {
      {{}, "subcommand"},
      {{"rum"}, "'rum' is not a command; did you mean 'run'?"},
      {{"toknize"}, "did you mean 'tokenize'?"},
      {{"fly"}, "commands are run, chat, serve"},
      {join(run, {"--promt", "x"}), "'--promt' is not an option of 'run'; did you mean '--prompt'?"},
      {join(run, {"--temperatures", "1"}), "did you mean '--temp'?"},
      {join(run, {"--cache-typ-k=f16"}), "did you mean '--cache-type-k'?"},
      {join(run, {"-ctl", "f16"}), "'-ctl' is not an option of 'run'; did you mean '-ctk'?"},
      {join(run, {"-ngx", "99"}), "'-ngx' is not an option of 'run'"},
      {join(run, {"-ngl", "many"}), "-ngl 'many'"},
      {join(run, {"-ngl", "0", "--kv-place", "gpu"}), "contradict each other"},
      {join(run, {"--device", "tpu"}), "--device 'tpu'"},
      {join(run, {"-ngl", "all", "--vram", "0"}), "--vram 0"},
      {join(run, {"--zzzzzz"}), "'--zzzzzz' is not an option of 'run'"},
      {join(bench, {"-c", "16"}), "'-c' is not an option of 'bench'; it belongs to run, chat, serve, ppl"},
      {{"chat", "-m", model, "-f", text}, "it belongs to run, ppl"},
      {join(run, {"extra"}), "'extra' is not expected"},
      {{"run", "-p", "x"}, "--model"},
      {{"run", "-m"}, "--model: the value is missing"},
      {join(run, {"-ctk", "f16", "-ctk", "f16"}), "is given more than once; give it once"},
      {join(run, {"--kv"}), "--kv: the value is missing"},
      {join(run, {"--kv-explain", "--kv-save", "x.kv"}), "--kv-explain runs nothing"},
      {{"kv", "save", "-m", model, "-f", text, "-o", "x.kv", "-c", "5"}, "has 17 tokens and the context is 5"},
      {{"tokenize", "-m", model, "-p", "x", "--override-pre", "foo"}, "--override-pre 'foo' is not known"},
      {{"run", "-m", "", "-p", "x"}, "--model: the value is empty"},
      {{"run", "-m", model}, "nothing to read"},
      {{"run", "-m", model, "-p", ""}, "nothing to read"},
      {join(run, {"-f", ""}), "--file: the value is empty"},
      {join(run, {"-m", model}), "--model is given more than once; give it once"},
      {join(run, {"--kv", "nosuch"}), "nosuch"},
      {join(run, {"--kv", "quest:budget=x"}), "budget"},
      {join(run, {"--kv", "full", "--kv-config", config}), "--kv and --kv-config both name a recipe"},
      {join(run, {"--kv-config", text}), "usage.txt"},
      {join(run, {"-t", "0"}), "--threads"},
      {join(run, {"-t", "-3"}), "--threads"},
      {join(run, {"-t", "99999"}), "--threads"},
      {join(run, {"-t", "two"}), "'two' is not a whole number"},
      {join(run, {"-c", "12x"}), "--ctx-size"},
      {join(run, {"-c", "-4"}), "--ctx-size"},
      {join(run, {"-c", "99999999999G"}), "--ctx-size '99999999999G' is out of range"},
      {join(run, {"-c", "99999999999999999999"}), "--ctx-size '99999999999999999999' is out of range"},
      {{"plan", "-m", model, "--ram", "9999999999999M"}, "--ram '9999999999999M' is out of range"},
      {join(run, {"-c", "100G"}), "out of range"},
      {join(run, {"-c", "16", "-n", "16"}), "-n 16"},
      {join(run, {"-n", "-2"}), "-n -2"},
      {join(run, {"-n", "99999999999999999999"}), "99999999999999999999 is out of range"},
      {join(run, {"-n", "0x10"}), "'0x10' is not a whole number"},
      {join(run, {"-n", "4.5"}), "'4.5' is not a whole number"},
      {join(run, {"-s", "99999999999999999999"}), "out of range"},
      {join(run, {"-ub", "0"}), "--ubatch-size"},
      {join(run, {"-ctk", "q9"}), "q9"},
      {join(run, {"-v", "-q"}), "--quiet"},
      {join(run, {"--temp", "nan"}), "--temp"},
      {join(run, {"--temp", "1e999"}), "--temp"},
      {join(run, {"--temp", "0x10"}), "'0x10' is not a number"},
      {join(run, {"--temp", " 1"}), "' 1' is not a number"},
      {join(run, {"--top-p", "1e-400"}), "1e-400 is out of range"},
      {join(run, {"-c", " 5"}), "--ctx-size ' 5' must be a number"},
      {join(run, {"--stats", "same", "--kv-save", "./same"}), "--stats and --kv-save both name './same'"},
      {{"inspect", "-m", model, "--picture", "same", "--export", "same"}, "--picture and --export both name"},
      {{"eval-kv", "-m", model, "-f", text, "--json", "-o", "csv"}, "--json and -o csv contradict each other"},
      {join(run, {"--temp", "-101"}), "--temp -101 must lie in [-100, 100]"},
      {join(run, {"--top-p", "2"}), "--top-p"},
      {join(run, {"--samplers", "top_k;magic"}), "magic"},
      {join(run, {"-l", "5"}), "ID+BIAS"},
      {join(run, {"-l", "9999+1"}), "token 9999; the model has 261 tokens"},
      {join(run, {"--isa", "mmx"}), "mmx"},
      {join(run, {"--prefill-type", "int4"}), "int4"},
      {join(run, {"--raw", "--chat-template", "chatml"}), "contradict"},
      {join(run, {"--raw", "--sys", "x"}), "system"},
      {join(run, {"--sys", "x"}), "--chat-template"},
      {join(run, {"--chat-template", "nosuch"}), "--chat-template 'nosuch'"},
      {join(run, {"--chat-template", "{% if true %}plain{% endif %}"}), "leaves out everything that was said"},
      {join(run, {"--keep-first"}), "-f"},
      {join(run, {"-f", text, "--keep-first", "--keep-last"}), "contradict"},
      {join(run, {"--rope-scale", "2"}), "--rope-scaling"},
      {join(run, {"--rope-scaling", "yarn", "--rope-scale", "0"}), "--rope-scale 0"},
      {join(run, {"--rope-scaling", "yarn", "--rope-scale", "inf"}), "--rope-scale: 'inf' is not a number"},
      {join(run, {"--rope-freq-base", "nan"}), "--rope-freq-base"},
      {join(run, {"--rope-freq-base", "1e300"}), "--rope-freq-base 1e+300 must be"},
      {join(run, {"--rope-scaling", "yarn", "--rope-scale", "1e-300"}), "--rope-scale 1e-300 must be"},
      {join(run, {"--yarn-orig-ctx", "64"}), "it needs yarn or longrope"},
      {join(run, {"--kv-explain", "--stats", text}), "--stats"},
      {join(run, {"--kv-check", "-1"}), "--kv-check"},
      {{"chat", "-m", model}, "--chat-template"},
      {ppl, "-f FILE"},
      {join(ppl, {"-f", text, "-c", "512"}), "one window needs 512"},
      {join(ppl, {"-f", text, "-c", "2"}), "at least 4"},
      {join(ppl, {"-f", text, "--chunks", "0"}), "--chunks"},
      {join(ppl, {"--kl-divergence"}), "--kl-divergence-base"},
      {join(bench, {"-n", "0"}), "nothing to measure"},
      {join(bench, {"-d", "8-4"}), "empty"},
      {join(bench, {"-d", "1-9*1"}), "does not advance"},
      {join(bench, {"-d", "5-"}), "-d"},
      {join(bench, {"-pg", "5"}), "-pg"},
      {join(bench, {"-r", "0"}), "--repetitions"},
      {join(bench, {"-o", "xml"}), "--output"},
      {join(bench, {"-o", "csv", "--json"}), "contradict"},
      {join(bench, {"-o", "md", "--json"}), "contradict"},
      {join(bench, {"-t", "1,0"}), "-t 0"},
      {join(bench, {"--kv", "full,nosuch"}), "nosuch"},
      {{"plan", "-m", model, "--ram", "many"}, "--ram"},
      {{"plan", "-m", model, "--ram", "0"}, "--ram 0"},
      {{"tokenize", "-m", model}, "-f FILE or as -p TEXT"},
      {{"tokenize", "-m", model, "-p", "x", "-f", text}, "not as both"},
      {{"inspect"}, "--model"},
      {{"version", "--isa", "mmx"}, "mmx"},
  };
  for (const Case& c : cases) EXPECT_TRUE(refuses(longkv_program(c.args), 2, c.message)) << line_of(c.args);
  ProgramInput environment;
  environment.environment = {"LONGKV_ISA=mmx"};
  EXPECT_TRUE(refuses(longkv_program({"version"}, environment), 2, "mmx"));
}

// A card is never replaced in silence by the CPU where one was asked for.
TEST(CliUsage, AnExplicitWishForACardIsMetOrRefused) {
  const std::string model = TinyModel().write("model.gguf");  // heads of 32 channels, which no card here has
  for (const char* option : {"-ngl", "--device", "--kv-place"}) {
    const std::string value = std::string(option) == "-ngl"       ? "all"
                              : std::string(option) == "--device" ? "cuda0"
                                                                  : "gpu";
    const Outcome o = longkv_program({"run", "-m", model, "-p", "abc", "--raw", "-n", "2", option, value});
    EXPECT_EQ(o.exit_code, 1) << option << o.err;
    EXPECT_EQ(o.out, "") << option;
    EXPECT_NE(o.err.find("card"), std::string::npos) << o.err;
  }
  EXPECT_EQ(longkv_program({"run", "-m", model, "-p", "abc", "--raw", "-n", "2", "-ngl", "0"}).exit_code, 0);
  EXPECT_EQ(longkv_program({"run", "-m", model, "-p", "abc", "--raw", "-n", "2"}).exit_code, 0);
  EXPECT_EQ(longkv_program({"plan", "-m", model, "-ngl", "all"}).exit_code, 2);
  EXPECT_EQ(longkv_program({"plan", "-m", model, "-ngl", "0"}).exit_code, 0);
  // A limit on a card that is not used is no silent matter.
  const Args limited = {"run", "-m", model, "-p", "abc", "--raw", "-n", "2", "--vram", "1G"};
  const Outcome told = longkv_program(limited);
  EXPECT_EQ(told.exit_code, 0) << told.err;
  EXPECT_NE(told.err.find("--vram is ignored"), std::string::npos) << told.err;
  EXPECT_TRUE(refuses(longkv_program(join(limited, {"--strict"})), 2, "--vram is ignored"));
}

// Layers that would go to a card, of a size that is only named.
TEST(CliUsage, APlanForACardThatIsNotThere) {
  const std::string model = repo_model("needle-10m-128k-f16.gguf");
  const auto plan = [&](std::initializer_list<std::string> more) {
    return longkv_program(join({"plan", "-m", model, "-c", "8K", "--json"}, more));
  };
  const auto layers = [](const Outcome& o) {
    const std::string key = "\"layers_on_card\": ";
    const size_t at = o.out.find(key);
    return at == std::string::npos ? -1 : std::atoi(o.out.c_str() + at + key.size());
  };
  EXPECT_EQ(layers(plan({})), -1);
  const int all = layers(plan({"--vram", "4G"})), none = layers(plan({"--vram", "100M"}));
  EXPECT_GT(all, 1);
  EXPECT_EQ(none, 0);  // what feeds layers from memory takes more than these 18 MiB of weights
  EXPECT_EQ(layers(plan({"--vram", "4G", "-ngl", "1"})), 1);
  EXPECT_EQ(plan({"--vram", "4G", "-ngl", "all"}).exit_code, 0);
  const Outcome small = plan({"--vram", "30M", "-ngl", "all"});
  EXPECT_EQ(small.exit_code, 1);
  EXPECT_NE(small.err.find("of VRAM are needed"), std::string::npos) << small.err;
}

// Where rows lie changes no bit, and what cannot lie there is refused.
TEST(CliUsage, ACacheOnADisk) {
  const std::string model = TinyModel().write("model.gguf");
  const Args run = {"run", "-m", model, "-p", "abcdef", "--raw", "-n", "8", "-t", "1", "--temp", "0", "--ignore-eos"};
  const Outcome here = longkv_program(run), there = longkv_program(join(run, {"--kv-place", "disk"}));
  EXPECT_EQ(there.exit_code, 0) << there.err;
  EXPECT_EQ(there.out, here.out);
  EXPECT_FALSE(here.out.empty());
  const Outcome lost = longkv_program(join(run, {"--kv-place", "disk", "--kv-dir", "/no/such/folder"}));
  EXPECT_EQ(lost.exit_code, 1);
  EXPECT_NE(lost.err.find("--kv-dir"), std::string::npos) << lost.err;
  const Outcome encoded = longkv_program(join(run, {"--kv-place", "disk", "--kv", "kivi4"}));
  EXPECT_NE(encoded.exit_code, 0);
  EXPECT_EQ(encoded.out, "");
  EXPECT_TRUE(refuses(longkv_program(join(run, {"--kv-dir", "/tmp", "--strict"})), 2, "--kv-dir is ignored"));
  const Args in_memory = join(run, {"--kv-place", "disk", "--kv-dir", "/dev/shm"});
  if (DiskSpace::in_memory("/dev/shm")) {
    EXPECT_NE(longkv_program(in_memory).err.find("lies in memory"), std::string::npos);
    EXPECT_TRUE(refuses(longkv_program(join(in_memory, {"--strict"})), 2, "lies in memory"));
  }
  EXPECT_FALSE(DiskSpace::in_memory("/proc"));
  EXPECT_TRUE(refuses(longkv_program({"serve", "-m", model, "--kv-place", "disk"}), 2, "in memory"));
  const Outcome plan = longkv_program({"plan", "-m", model, "--kv-place", "disk"});
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_NE(plan.out.find("K (on disk)"), std::string::npos) << plan.out;
}

// Help offers what a command can do, with the values that it has.
TEST(CliUsage, HelpIsTheCommandsOwn) {
  const auto help = [](const std::string& command) { return longkv_program({command, "--help-all"}).out; };
  EXPECT_NE(help("serve").find("--ubatch-size N=256"), std::string::npos);
  EXPECT_NE(help("run").find("--ubatch-size N=512"), std::string::npos);
  for (const char* command : {"run", "chat", "score", "eval", "train", "plan"}) {
    EXPECT_NE(help(command).find("--gpu-layers"), std::string::npos) << command;
  }
  for (const char* command : {"serve", "eval-kv", "search-prefill"}) {
    for (const char* option : {"--gpu-layers", "--vram", "--kv-place", "--kv-dir", "--device"})
      EXPECT_EQ(help(command).find(option), std::string::npos) << command << option;
  }
}

// What a run would say about the files of a recipe, the plan says too.
TEST(CliUsage, APlanReadsTheFilesOfTheRecipe) {
  const std::string model = TinyModel().write("model.gguf");
  for (const char* kv : {"full + prefill=minference(file=/no/such/file,dense_layers=0)",
                         "index=labels(file=/no/such/file) + select=topk(budget=128)"}) {
    for (const Args& command :
         {Args{"plan", "-m", model, "--kv", kv}, Args{"run", "-m", model, "-p", "abc", "--kv-explain", "--kv", kv},
          Args{"run", "-m", model, "-p", "abc", "--raw", "-n", "1", "--kv", kv}}) {
      const Outcome o = longkv_program(command);
      EXPECT_NE(o.exit_code, 0) << line_of(command);
      EXPECT_NE(o.err.find("/no/such/file"), std::string::npos) << line_of(command) << o.err;
      EXPECT_EQ(o.out, "") << line_of(command);
    }
  }
}

TEST(CliUsage, ValuesAreReadAsWritten) {
  const std::string model = TinyModel().write("model.gguf");
  const auto tokens = [&](const Args& more) {
    Args args = {"run", "-m", model, "-q", "-p", "abc", "--temp", "0", "--ignore-eos"};
    args.insert(args.end(), more.begin(), more.end());
    const Outcome o = longkv_program(args);
    EXPECT_TRUE(succeeds(o)) << line_of(more);
    return int(o.out.size()) - 1;  // one letter a token, and the line break
  };
  EXPECT_EQ(tokens({"-n", "12"}), 12);
  EXPECT_EQ(tokens({"-n", "012"}), 12) << "a leading zero is not octal";
  EXPECT_EQ(tokens({"-n12"}), 12);
  EXPECT_EQ(tokens({"--n-predict=12"}), 12);
  EXPECT_EQ(tokens({"-qn12", "-t", "1"}), 12) << "flags may stand together";
}

TEST(CliUsage, HelpFitsAScreen) {
  for (const std::string command : {"", "run", "chat", "bench", "ppl", "eval", "eval-kv", "score", "plan",
                                    "search-prefill", "inspect", "tokenize", "version"}) {
    for (const std::string flag : {"--help", "-h", "--help-all"}) {
      const Outcome o = longkv_program(command.empty() ? Args{flag} : Args{command, flag});
      EXPECT_TRUE(succeeds(o)) << command;
      EXPECT_TRUE(o.err.empty()) << o.err;
      EXPECT_GT(o.out.size(), 100u);
      size_t width = 0;
      for (size_t begin = 0; begin < o.out.size();) {
        const size_t end = std::min(o.out.find('\n', begin), o.out.size());
        width = std::max(width, end - begin);
        begin = end + 1;
      }
      EXPECT_LE(width, 80u) << o.out;
      if (flag == "--help-all") continue;
      EXPECT_LE(std::count(o.out.begin(), o.out.end(), '\n'), 50) << o.out;
      EXPECT_EQ(o.out.find("\n\n\n"), std::string::npos) << o.out;
    }
  }
  const std::string run = longkv_program({"run", "--help"}).out;
  EXPECT_NE(run.find("-ctk, --cache-type-k TEXT"), std::string::npos) << run;
  EXPECT_EQ(run.find("--ctk"), std::string::npos) << run;
  EXPECT_NE(longkv_program({"run", "--help-all"}).out.find("--repeat-penalty"), std::string::npos);
  EXPECT_NE(longkv_program({"--help"}).out.find("Exit codes"), std::string::npos);
}

TEST(CliUsage, VersionIsACommandAndAFlag) {
  const Outcome o = longkv_program({"version"});
  EXPECT_TRUE(succeeds(o));
  EXPECT_EQ(o.out.rfind("longkv ", 0), 0u);
  EXPECT_EQ(longkv_program({"--version"}).out, o.out);
}

TEST(CliUsage, FlagsOfSeveralLettersAsInLlamaCpp) {
  const Args base = {"run", "-m", needle(), "-q", "-t", "1", "--temp", "0", "-p", "abc", "-n", "8"};
  const Outcome plain = longkv_program(base);
  ASSERT_TRUE(succeeds(plain));
  const Outcome o = longkv_program(join(base, {"-ctk", "f16", "-ctv=f16", "-ub", "16", "-b", "2048", "-fa", "on"}));
  EXPECT_EQ(o.out, plain.out);
  EXPECT_NE(o.err.find("--batch-size is ignored"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("--flash-attn is ignored"), std::string::npos) << o.err;
}

TEST(CliUsage, EveryNoticeIsAnErrorWhenStrict) {
  const std::string model = TinyModel().write("model.gguf");
  const std::string text = write_temp("notice.txt", std::string(200, 'n'));
  const std::string config = write_temp("config.yaml", kConfig);
  const std::string base = temp_path("notice.logits");
  ASSERT_TRUE(succeeds(longkv_program({"ppl", "-m", model, "-f", text, "-c", "64", "--kl-divergence-base", base})));
  struct Case {
    Args args;
    std::string notice;
  };
  const Args run = {"run", "-m", model, "-p", "x", "-n", "1", "-t", "1"};
  const Args configured = {"run", "-m", model, "-p", "x", "-n", "1", "--kv-config", config};
  const Case cases[] = {
      {join(run, {"-fa", "on"}), "--flash-attn is ignored"},
      {join(run, {"-b", "64"}), "--batch-size is ignored"},
      {join(run, {"-c", "4096"}), "beyond the 512"},
      {join(run, {"--kv", "select=all + store=q8_0", "-ctk", "q4_0"}), "--cache-type-k q4_0 is used, not q8_0"},
      {join(run, {"--kv", "index=minmax + select=topk(budgets=\"2K,2K,2K\")"}),
       "budgets has 3 layers of a model of 2: the last 1 have no effect"},
      {join(run, {"--kv", "index=minmax + select=topk(budgets=\"2K/2K\")"}), "budgets has 2 KV heads in a layer of 1"},
      {join(run, {"--kv", "index=minmax + select=topk(dense=\"0,7\")"}),
       "dense names layer 7 of a model whose last is 1"},
      {join(run, {"--kv", "index=channels(channels=64) + select=topk"}), "channels=64 of keys of 32 channels"},
      {{"eval-kv", "-m", model, "-f", text, "-n", "4", "--kv", "index=channels(channels=64) + select=topk"},
       "channels=64 of keys of 32 channels"},
      {join(configured, {"-ub", "16"}), "--ubatch-size 16 is used, not chunk_size=64"},
      {join(configured, {"-c", "100"}), "--ctx-size 100 is used, not max_seq_len=400"},
      {join(configured, {"-t", "2"}), "--threads 2 is used, not threads_num=1"},
      {join(configured, {"-ctv", "q8_0"}), "--cache-type-v q8_0 is used, not f16"},
      {{"ppl", "-m", model, "-f", text, "-c", "64", "--chunks", "9"}, "there are only 3 windows"},
      {{"ppl", "-m", model, "-f", text, "--kl-divergence", "--kl-divergence-base", base}, "-f is ignored"},
      {{"bench", "-m", model, "-p", "4", "-n", "0", "-r", "1", "--fill", "random"}, "--fill random has no effect"},
  };
  for (const Case& c : cases) {
    const Outcome loose = longkv_program(c.args);
    EXPECT_TRUE(succeeds(loose)) << line_of(c.args);
    EXPECT_NE(loose.err.find("note: "), std::string::npos) << line_of(c.args) << loose.err;
    EXPECT_NE(loose.err.find(c.notice), std::string::npos) << line_of(c.args) << loose.err;
    EXPECT_TRUE(refuses(longkv_program(join(c.args, {"--strict"})), 2, c.notice)) << line_of(c.args);
  }
  const Outcome silent = longkv_program(join(configured, {"-ub", "64", "-c", "400", "-t", "1", "-q"}));
  EXPECT_TRUE(succeeds(silent));
  EXPECT_TRUE(silent.err.empty()) << "the same values need no notice: " << silent.err;
}

TEST(CliUsage, HelpIsACommandToo) {
  const Outcome help = longkv_program({"help"});
  EXPECT_TRUE(succeeds(help));
  EXPECT_EQ(help.out, longkv_program({"--help"}).out);
  EXPECT_EQ(longkv_program({"help", "kv", "save"}).out, longkv_program({"kv", "save", "--help"}).out);
  EXPECT_TRUE(refuses(longkv_program({"help", "rum"}), 2, "did you mean 'run'?"));
}

TEST(CliUsage, AConfigFileSetsWhatTheCommandLineDoesNot) {
  const std::string model = TinyModel().write("model.gguf");
  const std::string config = write_temp("config.yaml", kConfig);
  const auto plan = parsed(longkv_program({"plan", "-m", model, "--kv-config", config, "--json"}));
  EXPECT_EQ(plan["context"], 400);
  const auto smaller = parsed(longkv_program({"plan", "-m", model, "--kv-config", config, "--json", "-c", "300"}));
  EXPECT_EQ(smaller["context"], 300);
  const Outcome run = longkv_program({"run", "-m", model, "-p", "x", "-n", "1", "--kv-config", config});
  EXPECT_NE(run.err.find(" 1 threads"), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("index=minmax(block=32"), std::string::npos) << run.err;
}

}  // namespace
}  // namespace longkv::test
