// A read-only memory-mapped file. The mapping lives as long as the object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "longkv/status.h"

namespace longkv {

class MappedFile {
 public:
  // Errors: kIo when the file cannot be opened, is a directory or cannot be mapped. An empty file maps to an empty
  // span.
  static Result<MappedFile> open(const std::string& path);
  // Takes over an open descriptor, which stays open with the object; `name` stands for a path in messages.
  static Result<MappedFile> adopt(int fd, const std::string& name);
  // Opens and keeps the descriptor, so that parts of the file can be mapped elsewhere.
  static Result<MappedFile> open_kept(const std::string& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const uint8_t> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }
  int fd() const { return fd_; }  // -1: closed

 private:
  int fd_ = -1;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
  std::string path_;
};

// Gives the memory of whole pages inside [data, data + bytes) of a mapped file back; a later read brings them again.
void release_file_pages(const uint8_t* data, uint64_t bytes);

}  // namespace longkv
