// Clients that people use: the openai package, and a browser on the page.
#include <cstdio>
#include <filesystem>

#include "harness.h"

namespace longkv::server {
namespace {

std::string output_of(const std::string& command, int& code) {
  std::string out;
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  char buffer[4096];
  while (const size_t n = std::fread(buffer, 1, sizeof(buffer), pipe)) out.append(buffer, n);
  code = ::pclose(pipe);
  return out;
}

TEST(Clients, OpenAisPackage) {
  const char* python = std::getenv("LONGKV_PYTHON");
  const std::string interpreter = python != nullptr ? python : "python3";
  int code = 0;
  output_of(interpreter + " -c 'import openai'", code);
  if (code != 0) GTEST_SKIP() << "LONGKV_PYTHON names no Python with the openai package";
  std::string path = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
  TestServer server({}, path);
  const std::string out = output_of(interpreter + " " + LONGKV_TEST_DIR + "/server/openai_client.py http://127.0.0.1:" +
                                        std::to_string(server.port()) + "/v1",
                                    code);
  EXPECT_EQ(code, 0) << out;
  EXPECT_TRUE(out.ends_with("OK\n")) << out;
}

std::string browser() {
  for (const char* path : {"/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"}) {
    if (std::filesystem::exists(path)) return path;
  }
  return {};
}

// Keys, clicks, a document, stop; nothing is loaded from elsewhere, and no script fails.
TEST(Clients, ThePageInABrowser) {
  if (browser().empty()) GTEST_SKIP() << "no Chromium is installed";
  int code = 0;
  output_of("python3 --version", code);
  if (code != 0) GTEST_SKIP() << "no python3 is installed";
  const std::string model = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
  if (model.empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  TestServer server({}, model);
  const char* kept = std::getenv("LONGKV_SCREENSHOTS");
  const std::string folder = kept != nullptr ? kept : test::temp_path("page");
  std::filesystem::create_directories(folder);
  const std::string out =
      output_of("timeout 150 python3 " + std::string(LONGKV_TEST_DIR) + "/server/page.py " + browser() +
                    " http://127.0.0.1:" + std::to_string(server.port()) + "/ " + folder + " 60",
                code);
  EXPECT_EQ(code, 0) << out;
  EXPECT_TRUE(out.ends_with("OK\n")) << out;
}

}  // namespace
}  // namespace longkv::server
