// Reads KV files: whole ones, and those that continue a base file.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "base/portions.h"
#include "base/threads.h"
#include "kv/file/format.h"
#include "kv/state.h"
#include "longkv/status.h"

namespace longkv {

// A contiguous part of a segment's content as it lies in a file.
struct KvFilePart {
  const uint8_t* data = nullptr;
  uint64_t bytes = 0;
  int fd = -1;
  uint64_t offset = 0;  // in the file of fd
};

class KvFile {
 public:
  // Reads header, footer and directory, and checks them: every offset, size and name, that segments do not overlap, and
  // their sums. The segments themselves are not read. Errors: kIo, kCorrupt (what is damaged, where), kUnsupported
  // (another version).
  static Result<std::shared_ptr<KvFile>> open(const std::string& path);
  // The same of an open descriptor, which is taken over; `name` stands for the path.
  static Result<std::shared_ptr<KvFile>> adopt(int fd, const std::string& name);

  KvFileId id() const { return header_.id; }
  KvFileId base_id() const { return header_.base; }
  // Where the base's bytes come from. Errors: kInvalidArgument for a file with another id.
  Status set_base(std::shared_ptr<const KvFile> base);
  const std::shared_ptr<const KvFile>& base() const { return base_; }
  // Files that this one needs, itself included.
  int depth() const { return base_ ? base_->depth() + 1 : 1; }

  const std::string& path() const { return file_.path(); }
  uint64_t bytes() const { return file_.bytes().size(); }
  int fd() const { return file_.fd(); }
  std::span<const uint8_t> content() const { return file_.bytes(); }
  struct Segment {
    std::string name;
    KvEntry entry;
  };
  const std::vector<Segment>& segments() const { return segments_; }
  // nullptr if absent.
  const KvEntry* find(std::string_view name) const;

  // A segment's content of values. Errors: kCorrupt (absent, another size than expected, damaged).
  Status read(std::string_view name, void* data, uint64_t bytes) const;
  Result<std::string> text(std::string_view name, uint64_t most) const;
  // Content of a segment of pages in order, or its beginning if the rest cannot be had without decoding.
  std::vector<KvFilePart> parts(std::string_view name) const;
  // Content held in this file, decoded if need be. data: size - base_bytes bytes.
  Status unpack(const Segment& segment, uint8_t* data) const;

  // Checks the gaps between segments, which are zero, and the sums of all segments, or of those of values alone: pages
  // that are mapped are checked where they lie. Errors: kCorrupt.
  Status verify_gaps() const;
  Status verify(ThreadPool& pool) const;

 private:
  Status read_directory();
  Status damaged(const std::string& what) const;
  const uint8_t* at(uint64_t offset) const { return file_.bytes().data() + offset; }

  MappedFile file_;
  KvFileHeader header_{};
  KvFileFooter footer_{};
  std::vector<Segment> segments_;
  std::map<std::string, size_t, std::less<>> by_name_;
  std::shared_ptr<const KvFile> base_;
};

// Restores state from a file. Segments of pages are mapped, not copied, where they are not compressed.
class KvFileLoader final : public KvState {
 public:
  // verify: finish() also checks the sums of mapped pages, which reads them all; the others are always checked.
  KvFileLoader(std::shared_ptr<const KvFile> file, bool verify)
      : KvState(true), file_(std::move(file)), verify_(verify) {}
  // With `pause`, which is called between pieces, the calling thread does it alone.
  Status finish(ThreadPool& pool, const Pause& pause = {});
  uint64_t bytes_mapped() const { return mapped_; }
  uint64_t bytes_copied() const { return copied_; }

 protected:
  void bytes(const std::string& name, void* data, uint64_t n) override;
  uint64_t size_of(const std::string& name) override;
  void pages(const std::string& name, VirtualArray& array, std::span<const ByteRange> live) override;

 private:
  // Content of one file's part of a segment, where it now lies.
  struct Check {
    std::string name;
    uint64_t checksum = 0;
    std::vector<std::span<const uint8_t>> pieces;
  };
  bool place(const std::string& name, const KvFile& file, uint64_t from, uint64_t until, VirtualArray& array,
             std::span<const ByteRange> spans);

  static bool matches(const Check& check, const Pause& pause);

  std::shared_ptr<const KvFile> file_;
  const bool verify_;
  std::vector<Check> checks_;
  uint64_t mapped_ = 0;
  uint64_t copied_ = 0;
};

}  // namespace longkv
