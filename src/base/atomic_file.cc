#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.h"

namespace longkv {

namespace {

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Makes a rename durable. Some file systems cannot flush a directory (EINVAL); they need no flush.
Status flush_directory(const std::string& path) {
  const std::string directory = directory_of(path);
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return fail(Code::kIo, "cannot open directory '{}': {}", directory, std::strerror(errno));
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  if (error != 0 && error != EINVAL) {
    return fail(Code::kIo, "cannot flush directory '{}': {}", directory, std::strerror(error));
  }
  return {};
}

}  // namespace

Result<AtomicFile> AtomicFile::create(const std::string& path) {
  AtomicFile file;
  file.path_ = path;
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0) {
    if (S_ISDIR(st.st_mode)) return fail(Code::kIo, "cannot write '{}': it is a directory", path);
    if (!S_ISREG(st.st_mode)) {
      file.fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
      if (file.fd_ < 0) return fail(Code::kIo, "cannot open '{}': {}", path, std::strerror(errno));
      return file;
    }
    const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
    if (real) file.path_ = real.get();
  }
  // mkstemp would leave a file that only its owner can read; a plain open follows the user's umask.
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::string name = fmt::format("{}.{}-{}.tmp", file.path_, ::getpid(), counter.fetch_add(1));
    file.fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file.fd_ >= 0) {
      file.temporary_ = name;
      return file;
    }
    if (errno != EEXIST) break;
  }
  return fail(Code::kIo, "cannot create a file beside '{}': {}", path, std::strerror(errno));
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept { *this = std::move(other); }

AtomicFile& AtomicFile::operator=(AtomicFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(position_, other.position_);
  std::swap(path_, other.path_);
  std::swap(temporary_, other.temporary_);
  return *this;
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::discard() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

Status AtomicFile::write(std::span<const uint8_t> bytes) {
  if (fd_ < 0) return fail(Code::kInternal, "write to the finished file '{}'", path_);
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), std::min<size_t>(bytes.size(), size_t(1) << 30));
    if (n < 0) {
      if (errno == EINTR) continue;
      return fail(Code::kIo, "cannot write '{}' after {} bytes: {}", path_, position_, std::strerror(errno));
    }
    bytes = bytes.subspan(size_t(n));
    position_ += uint64_t(n);
  }
  return {};
}

Status AtomicFile::commit() {
  if (fd_ < 0) return fail(Code::kInternal, "commit of the finished file '{}'", path_);
  const bool in_place = temporary_.empty();
  // Devices and pipes have nothing to flush.
  int error = in_place || ::fsync(fd_) == 0 ? 0 : errno;
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && !in_place && std::rename(temporary_.c_str(), path_.c_str()) != 0) error = errno;
  if (error != 0) {
    discard();
    return fail(Code::kIo, "cannot finish '{}': {}", path_, std::strerror(error));
  }
  if (in_place) return {};
  temporary_.clear();
  return flush_directory(path_);
}

}  // namespace longkv
