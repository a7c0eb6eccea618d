#include "base/virtual_array.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/disk_space.h"
#include "base/error.h"

namespace longkv {

namespace {
constexpr uint64_t kHugePage = uint64_t(2) << 20;
constexpr uint64_t kDiskStep = uint64_t(64) << 10;  // by which arrays in a file grow, at least
}  // namespace

Result<VirtualArray> VirtualArray::reserve(uint64_t bytes) {
  VirtualArray array;
  if (bytes == 0) return array;
  // Over-reserve by one huge page so that the start can be aligned for the TLB's sake.
  const uint64_t total = bytes + kHugePage;
  if (total < bytes) return fail(Code::kOutOfMemory, "cannot reserve {} bytes of address space", bytes);
  void* p = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    return fail(Code::kOutOfMemory,
                "cannot reserve {} bytes of address space: {}; memory, or a limit on it (ulimit -v), is too small",
                bytes, std::strerror(errno));
  }
  const auto start = reinterpret_cast<uintptr_t>(p);
  const uintptr_t aligned = (start + kHugePage - 1) & ~uintptr_t(kHugePage - 1);
  if (aligned > start) ::munmap(p, aligned - start);
  const uint64_t page = uint64_t(::sysconf(_SC_PAGESIZE));
  const uintptr_t end = (aligned + bytes + page - 1) & ~uintptr_t(page - 1);
  auto* const bytes_of = static_cast<uint8_t*>(p);
  if (start + total > end) ::munmap(bytes_of + (end - start), start + total - end);
  array.data_ = bytes_of + (aligned - start);
  array.size_ = bytes;
  return array;
}

Result<VirtualArray> VirtualArray::reserve_in(std::shared_ptr<DiskSpace> disk, uint64_t bytes) {
  LONGKV_ASSIGN(VirtualArray array, reserve(bytes));
  if (bytes == 0) return array;
  LONGKV_ASSIGN(array.region_, disk->region(bytes));
  const uint64_t page = uint64_t(::sysconf(_SC_PAGESIZE));
  if (::mmap(array.data_, (bytes + page - 1) & ~(page - 1), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, disk->fd(),
             off_t(array.region_)) == MAP_FAILED) {
    return fail(Code::kIo, "a file in '{}' cannot be mapped: {}", disk->folder(), std::strerror(errno));
  }
  array.disk_ = std::move(disk);
  return array;
}

Status VirtualArray::grow_file(uint64_t bytes) {
  const uint64_t whole = (size_ + kDiskStep - 1) & ~(kDiskStep - 1);
  const uint64_t wanted = std::min(whole, (bytes + bytes / 32 + kDiskStep - 1) & ~(kDiskStep - 1));
  LONGKV_TRY(disk_->allocate(region_ + allocated_, wanted - allocated_));
  allocated_ = wanted;
  return {};
}

void VirtualArray::will_read(uint64_t begin, uint64_t end) const {
  const uint64_t page = uint64_t(::sysconf(_SC_PAGESIZE)), first = begin & ~(page - 1);
  if (disk_ != nullptr && first < end) ::madvise(data_ + first, std::min(end, size_) - first, MADV_WILLNEED);
}

VirtualArray::VirtualArray(VirtualArray&& other) noexcept { *this = std::move(other); }

VirtualArray& VirtualArray::operator=(VirtualArray&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_end_, other.mapped_end_);
  std::swap(disk_, other.disk_);
  std::swap(region_, other.region_);
  std::swap(allocated_, other.allocated_);
  return *this;
}

VirtualArray::~VirtualArray() {
  if (data_ != nullptr) ::munmap(data_, size_);
  if (disk_ != nullptr && allocated_ > 0) disk_->release(region_, allocated_);
}

void VirtualArray::advise_huge(uint64_t bytes) {
  if (disk_ != nullptr) return;  // its pages are the system's cache of a file
  const uint64_t whole = (bytes < size_ ? bytes : size_) & ~(kHugePage - 1);
  if (whole > 0) ::madvise(data_, whole, MADV_HUGEPAGE);
}

void VirtualArray::advise_small(uint64_t begin) {
  if (disk_ != nullptr) return;
  const uint64_t first = begin & ~(kHugePage - 1);
  if (first < size_) ::madvise(data_ + first, size_ - first, MADV_NOHUGEPAGE);
}

void VirtualArray::release(uint64_t begin, uint64_t end) {
  const uint64_t page = uint64_t(::sysconf(_SC_PAGESIZE));
  const uint64_t first = (begin + page - 1) & ~(page - 1);
  const uint64_t last = (end < size_ ? end : size_) & ~(page - 1);
  if (disk_ != nullptr) return release_file(begin, end);
  if (last <= first) return;
  const uint64_t of_file = mapped_end_ < last ? mapped_end_ : last;
  if (first < of_file) {
    // A file's pages would come back with the file's content; fresh ones take their place, in address space that is
    // held.
    (void)::mmap(data_ + first, of_file - first, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
  const uint64_t rest = first < of_file ? of_file : first;
  if (rest < last) ::madvise(data_ + rest, last - rest, MADV_DONTNEED);
}

// Whole steps only, and from where the last one ends in step with allocated_.
void VirtualArray::release_file(uint64_t begin, uint64_t end) {
  const uint64_t page = uint64_t(::sysconf(_SC_PAGESIZE));
  uint64_t first = (begin + page - 1) & ~(page - 1);
  const uint64_t last = end >= size_ ? allocated_ : std::min(allocated_, end & ~(page - 1));
  if (last <= first) return;
  if (first < mapped_end_) {  // a file that was mapped over it would show through
    (void)::mmap(data_ + first, std::min(last, (mapped_end_ + page - 1) & ~(page - 1)) - first, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED, disk_->fd(), off_t(region_ + first));
  }
  disk_->release(region_ + first, last - first);
  if (last == allocated_) allocated_ = first;
}

bool VirtualArray::map_file(int fd, uint64_t offset, uint64_t begin, uint64_t bytes) {
  const uint64_t page = uint64_t(::sysconf(_SC_PAGESIZE));
  const uint64_t whole = (size_ + page - 1) & ~(page - 1);
  if (bytes == 0) return true;
  if (offset % page != 0 || begin % page != 0 || bytes % page != 0 || begin > whole || bytes > whole - begin) {
    return false;
  }
  void* p = ::mmap(data_ + begin, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, fd,
                   static_cast<off_t>(offset));
  if (p == MAP_FAILED) return false;
  if (begin + bytes > mapped_end_) mapped_end_ = begin + bytes;
  return true;
}

}  // namespace longkv
