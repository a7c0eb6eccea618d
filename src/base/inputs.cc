#include "base/inputs.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "base/error.h"

namespace longkv {

namespace {

struct Inputs {
  std::mutex mutex;
  std::set<std::pair<dev_t, ino_t>> files;
};

Inputs& inputs() {
  static Inputs all;
  return all;
}

}  // namespace

Status check_readable(const std::string& path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0 || ::access(path.c_str(), R_OK) != 0) {
    return fail(Code::kIo, "cannot read '{}': {}", path, std::strerror(errno));
  }
  if (S_ISDIR(st.st_mode)) return fail(Code::kIo, "cannot read '{}': it is a directory", path);
  return {};
}

Status check_regular(const std::string& path) {
  LONGKV_TRY(check_readable(path));
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode)) return {};
  return fail(Code::kIo, "cannot read '{}': it is not a regular file", path);
}

void note_input(const std::string& path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0 || !S_ISREG(st.st_mode)) return;
  const std::lock_guard lock(inputs().mutex);
  inputs().files.emplace(st.st_dev, st.st_ino);
}

Status check_not_input(const std::string& path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0) return {};
  const std::lock_guard lock(inputs().mutex);
  if (!inputs().files.contains({st.st_dev, st.st_ino})) return {};
  return fail(Code::kInvalidArgument, "'{}' is read by this run and would be lost; name another file for the output",
              path);
}

}  // namespace longkv
