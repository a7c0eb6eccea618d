#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace longkv {

Result<MappedFile> MappedFile::adopt(int fd, const std::string& name) {
  MappedFile file;
  file.fd_ = fd;
  file.path_ = name;
  struct stat st {};
  if (::fstat(fd, &st) != 0) return fail(Code::kIo, "cannot read the size of '{}': {}", name, std::strerror(errno));
  if (!S_ISREG(st.st_mode)) return fail(Code::kIo, "'{}' is not a regular file", name);
  file.size_ = size_t(st.st_size);
  if (file.size_ > 0) {
    void* p = ::mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
      return fail(Code::kIo, "cannot map '{}' ({} bytes): {}", name, st.st_size, std::strerror(errno));
    }
    file.data_ = static_cast<const uint8_t*>(p);
  }
  return file;
}

Result<MappedFile> MappedFile::open_kept(const std::string& path) {
  // Without O_NONBLOCK a named pipe would be waited for until somebody writes to it; files take no notice of the flag.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return fail(Code::kIo, "cannot open '{}': {}", path, std::strerror(errno));
  return adopt(fd, path);
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  LONGKV_ASSIGN(MappedFile file, open_kept(path));
  ::close(file.fd_);
  file.fd_ = -1;
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), size_);
  if (fd_ >= 0) ::close(fd_);
}

void release_file_pages(const uint8_t* data, uint64_t bytes) {
  const auto page = uint64_t(::sysconf(_SC_PAGESIZE));
  const auto start = uint64_t(reinterpret_cast<uintptr_t>(data));
  const uint64_t first = (start + page - 1) / page * page, last = (start + bytes) / page * page;
  if (first < last) ::madvise(const_cast<uint8_t*>(data) + (first - start), last - first, MADV_DONTNEED);
}

}  // namespace longkv
