// A file without a name in which arrays that exceed memory lie (VirtualArray::reserve_in). It goes with its owner.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "longkv/status.h"

namespace longkv {

class DiskSpace {
 public:
  // Errors: kIo (the folder does not take files).
  static Result<std::shared_ptr<DiskSpace>> create(const std::string& folder);
  ~DiskSpace();
  DiskSpace(const DiskSpace&) = delete;
  DiskSpace& operator=(const DiskSpace&) = delete;

  const std::string& folder() const { return folder_; }
  int fd() const { return fd_; }
  // Where a new region of the file begins; it takes no space yet. Errors: kIo.
  Result<uint64_t> region(uint64_t bytes);
  // Gives bytes of the file room on the disk, so that writing to their pages cannot fail. Errors: kIo that says how
  // much is free when the disk is full.
  Status allocate(uint64_t offset, uint64_t bytes);
  // Returns them; they read as zero.
  void release(uint64_t offset, uint64_t bytes);
  // Bytes that the file takes on the disk.
  uint64_t allocated() const;
  // Bytes that the folder's disk has left; -1: unknown.
  static int64_t free_bytes(const std::string& folder);
  // Whether files in the folder lie in memory (tmpfs, ramfs), so that a cache there spares none.
  static bool in_memory(const std::string& folder);

 private:
  DiskSpace(std::string folder, int fd) : folder_(std::move(folder)), fd_(fd) {}

  std::string folder_;
  int fd_;
  uint64_t end_ = 0;
};

}  // namespace longkv
