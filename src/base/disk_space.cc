#include "base/disk_space.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace longkv {

namespace {
constexpr uint64_t kRegion = uint64_t(2) << 20;  // regions begin at multiples, as arrays in memory do
}

Result<std::shared_ptr<DiskSpace>> DiskSpace::create(const std::string& folder) {
  int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {        // a file system without nameless files
    std::string name = folder + "/longkv-" + std::string(6, 'X');  // letters that mkostemp replaces
    fd = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd >= 0) ::unlink(name.c_str());
  }
  if (fd < 0) {
    return fail(Code::kIo, "the folder '{}' takes no file for the KV cache: {}; name another with --kv-dir", folder,
                std::strerror(errno));
  }
  return std::shared_ptr<DiskSpace>(new DiskSpace(folder, fd));
}

DiskSpace::~DiskSpace() { ::close(fd_); }

Result<uint64_t> DiskSpace::region(uint64_t bytes) {
  const uint64_t begin = end_, end = begin + (bytes + kRegion - 1) / kRegion * kRegion;
  if (end < begin || ::ftruncate(fd_, off_t(end)) != 0) {
    return fail(Code::kIo, "the disk of '{}' takes no file of {} bytes: {}", folder_, end, std::strerror(errno));
  }
  end_ = end;
  return begin;
}

Status DiskSpace::allocate(uint64_t offset, uint64_t bytes) {
  int error = 0;
  do {
    error = ::posix_fallocate(fd_, off_t(offset), off_t(bytes));
  } while (error == EINTR);
  if (error == 0) return {};
  const int64_t free = free_bytes(folder_);
  if (error == ENOSPC || error == EDQUOT) {
    return fail(
        Code::kIo,
        "the disk of '{}' is full: the KV cache holds {} MiB there, needs more, and {} MiB are free; free some, "
        "name another folder with --kv-dir, or use a smaller type of KV rows",
        folder_, allocated() >> 20, free >> 20);
  }
  return fail(Code::kIo, "the disk of '{}' refuses {} KiB for the KV cache: {}", folder_, bytes >> 10,
              std::strerror(error));
}

void DiskSpace::release(uint64_t offset, uint64_t bytes) {
  if (::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(bytes)) == 0) return;
  // A disk that cannot keeps the space; what was there must read as zero all the same.
  const std::vector<char> zeros(size_t(1) << 16);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = ::pwrite(fd_, zeros.data(), std::min<uint64_t>(zeros.size(), bytes - done), off_t(offset + done));
    if (n <= 0) return;
    done += uint64_t(n);
  }
}

uint64_t DiskSpace::allocated() const {
  struct stat s {};
  return ::fstat(fd_, &s) == 0 ? uint64_t(s.st_blocks) * 512 : 0;
}

int64_t DiskSpace::free_bytes(const std::string& folder) {
  struct statvfs s {};
  if (::statvfs(folder.c_str(), &s) != 0) return -1;
  return int64_t(s.f_bavail) * int64_t(s.f_frsize);
}

bool DiskSpace::in_memory(const std::string& folder) {
  struct statfs s {};
  return ::statfs(folder.c_str(), &s) == 0 && (s.f_type == TMPFS_MAGIC || s.f_type == RAMFS_MAGIC);
}

}  // namespace longkv
