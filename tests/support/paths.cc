#include "support/paths.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace longkv::test {

namespace fs = std::filesystem;

std::string golden(const std::string& name) { return std::string(LONGKV_TEST_DIR) + "/golden/" + name; }

std::string repo_model(const std::string& name) { return std::string(LONGKV_SOURCE_DIR) + "/models/" + name; }

std::string fetched_model(const std::string& name) {
  const char* dir = std::getenv("LONGKV_MODELS");
  const std::string path =
      (dir != nullptr ? std::string(dir) : std::string(LONGKV_SOURCE_DIR) + "/.cache/models") + "/" + name;
  return fs::exists(path) ? path : std::string();
}

std::string temp_path(const std::string& name) {
  struct Dir {
    fs::path path = fs::temp_directory_path() / ("longkv_test_" + std::to_string(::getpid()));
    Dir() { fs::create_directories(path); }
    ~Dir() {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
  };
  static Dir dir;
  return (dir.path / name).string();
}

}  // namespace longkv::test
