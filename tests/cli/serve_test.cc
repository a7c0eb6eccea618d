// `longkv serve` as a program: every kind of trouble, in a short form (tests/server/trouble.py runs the long one).
#include <array>
#include <cstdio>
#include <cstdlib>

#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

std::string output_of(const std::string& command, int& code) {
  std::string out;
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return out;
  std::array<char, 4096> buffer;
  while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) out.append(buffer.data(), n);
  code = ::pclose(pipe);
  return out;
}

TEST(Serve, EveryKindOfTrouble) {
  int code = 0;
  output_of("python3 --version", code);
  if (code != 0) GTEST_SKIP() << "no python3 is installed";
  const std::string out =
      output_of("timeout 200 python3 " LONGKV_TEST_DIR "/server/trouble.py " LONGKV_BINARY_DIR "/longkv " +
                    repo_model("needle-10m-128k-f16.gguf") + " --requests 200 --kills 3 --other-model " +
                    tiny_chat_model().write("serve_other.gguf"),
                code);
  EXPECT_EQ(code, 0) << out;
  EXPECT_TRUE(out.ends_with("OK\n")) << out;
}

// curl, openai, llm, lm-eval and schemathesis, as far as they are installed.
TEST(Serve, ClientsThatPeopleUse) {
  int code = 0;
  output_of("python3 --version", code);
  if (code != 0) GTEST_SKIP() << "no python3 is installed";
  const std::string model = fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
  if (model.empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  const std::string out =
      output_of("timeout 300 python3 " LONGKV_TEST_DIR "/server/clients.py " LONGKV_BINARY_DIR "/longkv " + model +
                    " --examples 10",
                code);
  EXPECT_EQ(code, 0) << out;
  if (out.find("skipped") != std::string::npos) GTEST_SKIP() << out << "LONGKV_PYTHON names a Python that has them";
}

TEST(Serve, SaysWhatIsWrongWithItsOptions) {
  const std::string model = repo_model("needle-10m-128k-f16.gguf");
  const Args serve = {"serve", "-m", model, "--port", "0", "-c", "512"};
  EXPECT_TRUE(refuses(longkv_program(join(serve, {"--cache-ram", "much"})), 2, "--cache-ram"));
  EXPECT_TRUE(refuses(longkv_program(join(serve, {"--cache-folder", "/proc/no/such"})), 1, "cannot make the folder"));
  EXPECT_TRUE(refuses(longkv_program(join(serve, {"--cache-folder", "/tmp"})), 2, "others may write"));
  EXPECT_TRUE(refuses(longkv_program(join(serve, {"--allow-kv", "nonsense"})), 2, "--allow-kv"));
  EXPECT_TRUE(refuses(longkv_program(join(serve, {"--slot-save-path", "/no/such/folder"})), 2, "--slot-save-path"));
}

}  // namespace
}  // namespace longkv::test
