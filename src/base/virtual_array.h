// A byte array with a reserved address range whose pages are only paid for once written.
//
// The KV cache grows inside such a range without copying: capacity costs address space, not memory. Pages come from
// the thread that writes them first, so they lie on that thread's NUMA node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "longkv/status.h"

namespace longkv {

class DiskSpace;

class VirtualArray {
 public:
  // Reserves `bytes` of address space, zero-filled on first touch. Errors: kOutOfMemory.
  static Result<VirtualArray> reserve(uint64_t bytes);

  // The same in a file, of which memory holds what was used lately. Errors: also kIo.
  static Result<VirtualArray> reserve_in(std::shared_ptr<DiskSpace> disk, uint64_t bytes);

  VirtualArray() = default;
  VirtualArray(VirtualArray&& other) noexcept;
  VirtualArray& operator=(VirtualArray&& other) noexcept;
  VirtualArray(const VirtualArray&) = delete;
  VirtualArray& operator=(const VirtualArray&) = delete;
  ~VirtualArray();

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }

  // Makes [0, bytes) fit to be written: of an array in a file, gives it room on the disk, with a thirty-second to
  // spare. Errors: kIo when the disk is full; nothing has changed then.
  Status grow(uint64_t bytes) {
    if (disk_ == nullptr || bytes <= allocated_) return {};
    return grow_file(bytes);
  }
  bool in_file() const { return disk_ != nullptr; }
  // Says that [begin, end) will be read soon, in an array in a file.
  void will_read(uint64_t begin, uint64_t end) const;

  // Asks for huge pages in the whole 2 MiB units inside [0, bytes); a hint, never an error.
  void advise_huge(uint64_t bytes);
  // Asks for small pages in the 2 MiB units that [begin, size) touches, so that few written bytes there cost little.
  void advise_small(uint64_t begin);
  // Returns whole pages inside [begin, end) to the system; their content reads as zero afterwards.
  void release(uint64_t begin, uint64_t end);
  // Puts `bytes` bytes of a file, from `offset` on, at [begin, begin + bytes) without copying: pages are read when
  // touched, and writing to one gives this array its own copy of it. Up to a page after the array's end may be covered.
  // False where the addresses are not whole pages of this system, or the system refuses: nothing has changed then.
  bool map_file(int fd, uint64_t offset, uint64_t begin, uint64_t bytes);

 private:
  Status grow_file(uint64_t bytes);
  void release_file(uint64_t begin, uint64_t end);

  uint8_t* data_ = nullptr;
  uint64_t size_ = 0;
  uint64_t mapped_end_ = 0;  // pages below may belong to a file that map_file() was given
  std::shared_ptr<DiskSpace> disk_;
  uint64_t region_ = 0;     // where the array begins in it
  uint64_t allocated_ = 0;  // bytes below have room on the disk
};

}  // namespace longkv
