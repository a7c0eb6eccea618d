// `longkv train` and what shows its files: learning, stopping, pictures, exports, and everything that can be wrong.
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cuda/cards.h"
#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

std::string needle() { return repo_model("needle-10m-128k-f16.gguf"); }

Args train(const std::string& kind, const std::string& output, std::initializer_list<std::string> more) {
  Args args = join({"train",     kind,  "-m",     needle(), "-o",       output, "-t",          "2", "--shortest", "448",
                    "--longest", "448", "--sink", "32",     "--window", "128",  "--questions", "2", "--held-out", "1"},
                   more);
  return args;
}

TEST(CliTrain, AMaskIsLearnedDrawnAndExported) {
  const std::string mask = temp_path("mask.gguf"), picture = temp_path("mask.svg"), table = temp_path("mask.pth");
  const auto learned = parsed(
      longkv_program(train("leank", mask, {"--learn", "channels", "--ratio", "0.5", "--refine-steps", "2", "--json"})));
  EXPECT_LE(learned["bytes_of_old_rows_kept"], 0.76);
  EXPECT_GT(learned["bytes_of_old_rows_kept"], 0.6);
  EXPECT_FALSE(std::filesystem::exists(mask + ".checkpoint"));
  const Outcome drawn = longkv_program({"inspect", "-m", mask, "--picture", picture, "--export", table});
  ASSERT_TRUE(succeeds(drawn));
  EXPECT_NE(drawn.out.find("channels of K that old rows keep, of 64"), std::string::npos) << drawn.out;
  EXPECT_EQ(file_bytes(picture).rfind("<svg", 0), 0u);
  EXPECT_NE(file_bytes(picture).find("Share of K that old rows keep"), std::string::npos);
  // Both files give the same answers.
  const auto answer = [&](const std::string& file) {
    return longkv_program({"run", "-m", needle(), "-q", "-t", "1", "--temp", "0", "--ignore-eos", "-p",
                           std::string(600, 'x'), "-n", "8", "--kv",
                           "leank:mask=\"" + file + "\",sink=4,window=32,mean=on"});
  };
  const Outcome a = answer(mask);
  ASSERT_TRUE(succeeds(a));
  EXPECT_TRUE(succeeds(answer(table)));
  // For another model it is refused, by name where the shape fits.
  EXPECT_TRUE(refuses(longkv_program({"run", "-m", TinyModel().write("tiny.gguf"), "-p", "abc", "-n", "1", "-q", "--kv",
                                      "leank:mask=\"" + mask + "\""}),
                      2, "the channel mask is for"));
}

TEST(CliTrain, GatesAsTableAndSidecar) {
  const std::string table = temp_path("gates.tsv"), sidecar = temp_path("gates.gguf"), again = temp_path("again.tsv");
  ASSERT_TRUE(succeeds(longkv_program(train("duo", table, {"--steps", "3"}))));
  ASSERT_TRUE(succeeds(longkv_program(train("duo", sidecar, {"--steps", "3"}))));
  const Outcome drawn = longkv_program({"inspect", "-m", sidecar, "--export", again});
  ASSERT_TRUE(succeeds(drawn));
  EXPECT_NE(drawn.out.find("mean gate"), std::string::npos);
  EXPECT_EQ(file_bytes(again), file_bytes(table));  // the same seed, the same gates
  const std::string over = temp_path("over.gguf");
  ASSERT_TRUE(succeeds(
      longkv_program(train("leank", over, {"--gates", sidecar, "--learn", "directions", "--refine-steps", "0"}))));
  EXPECT_NE(longkv_program({"inspect", "-m", over}).out.find("numbers of a K row that old rows keep"),
            std::string::npos);
}

TEST(CliTrain, SaysWhatCannotBeLearned) {
  const std::string mask = temp_path("never.gguf");
  TinyModel capped;
  capped.more = [](MkGguf& file) { file.f32("llama.attn_logit_softcapping", 50.0f); };
  EXPECT_TRUE(
      refuses(longkv_program({"train", "leank", "-m", capped.write("capped.gguf"), "-o", mask}), 1, "not capped"));
  const std::string text = write_temp("short.txt", "Too short to learn from.\n");
  EXPECT_TRUE(refuses(longkv_program(train("leank", mask, {"--kv-place", "gpu"})), 2, "learns, from rows in memory"));
  EXPECT_TRUE(refuses(longkv_program(train("leank", mask, {"-ngl", "0", "--device", "cuda0"})), 2, "contradict"));
  if (const auto cards = cuda_cards(); !cards.ok()) {
    EXPECT_TRUE(refuses(longkv_program(train("leank", mask, {"-ngl", "all"})), 1, cards.status().message()));
  }
  EXPECT_TRUE(refuses(longkv_program(train("leank", mask, {"--data", text})), 2, "give longer texts"));
  EXPECT_TRUE(refuses(longkv_program(train("leank", mask, {"--only-data"})), 2, "some of your own"));
  EXPECT_TRUE(refuses(longkv_program(train("leank", mask, {"--data", "/nowhere/x.txt"})), 1, "/nowhere/x.txt"));
  EXPECT_TRUE(refuses(longkv_program(train("leank", "/nowhere/mask.gguf", {})), 1, "/nowhere"));
  EXPECT_TRUE(
      refuses(longkv_program({"train", "leank", "-m", needle(), "-o", mask, "--longest", "2K", "--window", "4K"}), 2,
              "longer documents"));
  EXPECT_TRUE(refuses(longkv_program(train("leank", mask, {"--align", "7"})), 2, "does not divide"));
  EXPECT_TRUE(refuses(longkv_program({"inspect", "-m", needle(), "--picture", mask}), 2, "neither a channel mask"));
  EXPECT_FALSE(std::filesystem::exists(mask));
}

TEST(CliTrain, ALossThatIsNoNumberKeepsTheLastGoodState) {
  const std::string mask = temp_path("nan.gguf"), checkpoint = mask + ".checkpoint";
  EXPECT_TRUE(refuses(
      longkv_program(train("leank", mask, {"--learn", "directions", "--refine-steps", "50", "--refine-rate", "1e30"})),
      1, "not a number at step"));
  EXPECT_FALSE(std::filesystem::exists(mask));
  ASSERT_TRUE(std::filesystem::exists(checkpoint));
  // The state is one that learning can go on from: with other options it is named as another run's, not as damaged.
  EXPECT_TRUE(refuses(longkv_program(train("leank", mask, {"--learn", "directions", "--refine-steps", "50"})), 2,
                      "holds the state of another run"));
}

TEST(CliTrain, NoRoomForTheCheckpoint) {
  const std::string mask = temp_path("full.gguf");
  ProgramInput input;
  input.file_limit = 300 << 10;  // the mask fits, the state with its moments does not
  const Outcome outcome = longkv_program(train("leank", mask, {"--learn", "directions", "--refine-steps", "1"}), input);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("could not be saved"), std::string::npos) << outcome.err;
  EXPECT_TRUE(std::filesystem::exists(mask));
}

TEST(CliTrain, AStoppedRunGoesOn) {
  const std::string whole = temp_path("whole.gguf"), mask = temp_path("stopped.gguf");
  ASSERT_TRUE(succeeds(longkv_program(
      train("leank", whole, {"--learn", "directions", "--loss", "divergence", "--refine-steps", "12"}))));
  ProgramInput input;
  input.signal_when = [](const Outcome& o) { return o.err.find("stage 2 step") != std::string::npos; };
  const Outcome stopped = longkv_program(
      train("leank", mask, {"--learn", "directions", "--loss", "divergence", "--refine-steps", "12", "-v"}), input);
  if (stopped.exit_code != 0) {
    ASSERT_TRUE(std::filesystem::exists(mask + ".checkpoint"));
    ASSERT_TRUE(succeeds(longkv_program(
        train("leank", mask, {"--learn", "directions", "--loss", "divergence", "--refine-steps", "12"}))));
  }
  EXPECT_EQ(file_bytes(mask), file_bytes(whole));
}

}  // namespace
}  // namespace longkv::test
