// Writes a KV file from front to back.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kv/file/format.h"
#include "kv/state.h"

namespace longkv {

class KvFile;

struct KvWriteOptions {
  bool compress = false;  // zstd where it makes a segment smaller; such segments cannot be mapped
  KvFileId id = {};       // of a prefix cache
  // A file that holds the beginning of what is written: equal first pages of an array are not written again. Readers
  // then need that file too.
  std::shared_ptr<const KvFile> base = {};
};

class KvFileWriter final : public KvState {
 public:
  // Takes bytes in order, a quarter of a megabyte at most.
  using Sink = std::function<Status(std::span<const uint8_t>)>;

  KvFileWriter(Sink sink, const KvWriteOptions& options);
  void text(std::string_view name, const std::string& value);
  // Directory and footer; the file is complete then. Errors: whatever the sink or a visited part said.
  Status finish();
  uint64_t bytes_written() const { return position_; }

 protected:
  void bytes(const std::string& name, void* data, uint64_t n) override;
  uint64_t size_of(const std::string& name) override;
  void pages(const std::string& name, VirtualArray& array, std::span<const ByteRange> live) override;

 private:
  // Content in pieces; a piece without data stands for zeros.
  struct Piece {
    const uint8_t* data = nullptr;
    uint64_t bytes = 0;
  };
  void put(const void* data, uint64_t n);
  void put_zeros(uint64_t n);
  void align(uint64_t to);
  void segment(const std::string& name, KvSegmentKind kind, std::span<const Piece> pieces);
  bool compressed(KvEntry& entry, std::span<const Piece> pieces);
  uint64_t same_as_base(const std::string& name, std::span<const Piece> pieces) const;

  Sink sink_;
  KvWriteOptions options_;
  uint64_t position_ = 0;
  std::vector<KvEntry> entries_;
  std::vector<std::string> names_;
  std::vector<uint8_t> gathered_, packed_;
};

}  // namespace longkv
