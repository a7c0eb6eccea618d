// A file that appears under its name only when it is complete.
//
// Bytes go to a file in the target's directory, without a name where the file system has such files; commit() flushes
// them to the device and renames. Without a commit the target, old or absent, stays as it was and nothing is left
// behind, also when the process is killed (file systems without nameless files keep .longkv-*.tmp then). A symbolic
// link stays and its target is replaced. Devices and pipes (/dev/stdout, /dev/null) cannot be replaced by a rename:
// they are written in place.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "longkv/status.h"

namespace longkv {

class AtomicFile {
 public:
  // Errors: kIo when the directory of `path` cannot be written, or `path` is a directory.
  static Result<AtomicFile> create(const std::string& path);

  AtomicFile() = default;
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) noexcept;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();  // removes what was not committed

  // Appends. Errors: kIo (for example a full disk).
  Status write(std::span<const uint8_t> bytes);
  // Bytes appended so far.
  uint64_t position() const { return position_; }
  // Replaces `path`. The object is finished afterwards, whatever the outcome. Without `durable` nothing is flushed to
  // the device: for files that may be lost, or found damaged, when the machine loses power.
  Status commit(bool durable = true);

 private:
  void discard();
  // Tries free names beside the target until `make` succeeds with one, and keeps it.
  Status take_name(const std::function<bool(const std::string& name)>& make);

  int fd_ = -1;
  uint64_t position_ = 0;
  std::string path_;
  std::string temporary_;  // name beside the target; empty while there is none
  bool replaces_ = false;  // false: written in place
};

}  // namespace longkv
