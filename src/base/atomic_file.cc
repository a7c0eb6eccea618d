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
#include "base/inputs.h"

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

// What links a file without a name into a directory.
std::string descriptor_path(int fd) { return fmt::format("/proc/self/fd/{}", fd); }

// A file in `directory` that has no name yet: it vanishes with the process, however that ends. -1 where the file system
// or the kernel has no such files.
int open_nameless(const std::string& directory) {
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
  if (fd >= 0 && ::access(descriptor_path(fd).c_str(), F_OK) != 0) {
    ::close(fd);
    return -1;
  }
  return fd;
}

}  // namespace

Result<AtomicFile> AtomicFile::create(const std::string& path) {
  AtomicFile file;
  file.path_ = path;
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0) {
    if (S_ISDIR(st.st_mode)) return fail(Code::kIo, "cannot write '{}': it is a directory", path);
    if (!S_ISREG(st.st_mode)) {
      // A pipe that nobody reads would block the open for ever.
      file.fd_ = ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
      if (file.fd_ < 0 && errno == ENXIO)
        return fail(Code::kIo, "cannot write '{}': it is a pipe that nobody reads", path);
      if (file.fd_ < 0) return fail(Code::kIo, "cannot open '{}': {}", path, std::strerror(errno));
      ::fcntl(file.fd_, F_SETFL, ::fcntl(file.fd_, F_GETFL) & ~O_NONBLOCK);
      return file;
    }
    LONGKV_TRY(check_not_input(path));
    const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
    if (real) file.path_ = real.get();
  } else if (errno != ENOENT) {
    return fail(Code::kIo, "cannot write '{}': {}", path, std::strerror(errno));
  }
  file.replaces_ = true;
  file.fd_ = open_nameless(directory_of(file.path_));
  if (file.fd_ >= 0) return file;
  LONGKV_TRY(file.take_name([&](const std::string& name) {
    // mkstemp would leave a file that only its owner can read; a plain open follows the user's umask.
    file.fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return file.fd_ >= 0;
  }));
  return file;
}

Status AtomicFile::take_name(const std::function<bool(const std::string& name)>& make) {
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100; ++attempt) {
    // Not derived from the target's name, which may already be as long as names can be.
    const std::string name = fmt::format("{}/.longkv-{}-{}.tmp", directory_of(path_), ::getpid(), counter.fetch_add(1));
    if (make(name)) {
      temporary_ = name;
      return {};
    }
    if (errno != EEXIST) break;
  }
  return fail(Code::kIo, "cannot create a file beside '{}': {}", path_, std::strerror(errno));
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept { *this = std::move(other); }

AtomicFile& AtomicFile::operator=(AtomicFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(position_, other.position_);
  std::swap(path_, other.path_);
  std::swap(temporary_, other.temporary_);
  std::swap(replaces_, other.replaces_);
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

Status AtomicFile::commit(bool durable) {
  if (fd_ < 0) return fail(Code::kInternal, "commit of the finished file '{}'", path_);
  // Again: what this run reads may have been opened since.
  if (Status free = replaces_ ? check_not_input(path_) : Status(); !free.ok()) {
    discard();
    return free;
  }
  // Devices and pipes have nothing to flush.
  int error = !replaces_ || !durable || ::fsync(fd_) == 0 ? 0 : errno;
  if (error == 0 && replaces_ && temporary_.empty()) {
    const std::string nameless = descriptor_path(fd_);
    Status named = take_name([&](const std::string& name) {
      return ::linkat(AT_FDCWD, nameless.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
    });
    if (!named.ok()) {
      discard();
      return named;
    }
  }
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && replaces_ && std::rename(temporary_.c_str(), path_.c_str()) != 0) error = errno;
  if (error != 0) {
    discard();
    return fail(Code::kIo, "cannot finish '{}': {}", path_, std::strerror(error));
  }
  if (!replaces_) return {};
  temporary_.clear();
  return durable ? flush_directory(path_) : Status();
}

}  // namespace longkv
