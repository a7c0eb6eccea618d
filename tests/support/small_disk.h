// A file system of a few MiB for what must happen when a disk is full.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include "base/disk_space.h"

namespace longkv::test {

constexpr int kNoSmallDisk = 77;

// Runs `body` with a folder that is such a file system, in a process of its own, so that it goes with it. Returns what
// body does (0: all is well), kNoSmallDisk where none can be mounted, or 128 and the signal that ended the process.
inline int on_a_small_disk(const std::string& size, const std::function<int(const std::string&)>& body) {
  std::string folder = std::string(std::filesystem::temp_directory_path()) + "/longkv-small-" + std::string(6, 'X');
  if (::mkdtemp(folder.data()) == nullptr) return kNoSmallDisk;
  const pid_t child = ::fork();
  if (child == 0) {
    const auto mounted = [&] { return ::mount("tmpfs", folder.c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0; };
    if (!mounted() && (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 || !mounted())) ::_exit(kNoSmallDisk);
    const int result = body(folder);
    (void)::umount(folder.c_str());
    ::_exit(result);
  }
  int status = 0;
  const bool ended = ::waitpid(child, &status, 0) == child;
  (void)::umount2(folder.c_str(), MNT_DETACH);  // of a process that ended early
  std::error_code error;
  std::filesystem::remove_all(folder, error);
  if (!ended) return kNoSmallDisk;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Takes what is free in the folder but for `bytes`, until it goes.
class Filler {
 public:
  Filler(const std::string& folder, int64_t bytes) : path_(folder + "/filler") {
    const int fd = ::open(path_.c_str(), O_CREAT | O_WRONLY, 0600);
    full_ = fd >= 0 && ::posix_fallocate(fd, 0, DiskSpace::free_bytes(folder) - bytes) == 0;
    if (fd >= 0) ::close(fd);
  }
  ~Filler() { ::unlink(path_.c_str()); }
  Filler(const Filler&) = delete;
  Filler& operator=(const Filler&) = delete;
  bool full() const { return full_; }

 private:
  std::string path_;
  bool full_ = false;
};

}  // namespace longkv::test
