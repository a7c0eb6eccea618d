#include "kv/file/reader.h"

#include <zstd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"

namespace longkv {

namespace {

// A model of many layers and heads has some tens of segments for each; more are no KV file.
constexpr uint64_t kMostEntries = uint64_t(1) << 24;

bool all_zero(const uint8_t* data, uint64_t n) {
  return std::all_of(data, data + n, [](uint8_t b) { return b == 0; });
}

}  // namespace

Result<std::shared_ptr<KvFile>> KvFile::open(const std::string& path) {
  auto file = std::make_shared<KvFile>();
  LONGKV_ASSIGN(file->file_, MappedFile::open_kept(path));
  LONGKV_TRY(file->read_directory());
  return file;
}

Result<std::shared_ptr<KvFile>> KvFile::adopt(int fd, const std::string& name) {
  auto file = std::make_shared<KvFile>();
  LONGKV_ASSIGN(file->file_, MappedFile::adopt(fd, name));
  LONGKV_TRY(file->read_directory());
  return file;
}

Status KvFile::damaged(const std::string& what) const {
  return fail(Code::kCorrupt, "KV file '{}': {}; it is damaged, save it anew", path(), what);
}

Status KvFile::read_directory() {
  const uint64_t size = bytes();
  if (size < sizeof(KvFileHeader) + sizeof(KvFileFooter)) {
    return fail(Code::kCorrupt, "'{}' has {} bytes, less than any KV file; it is not one, or was cut", path(), size);
  }
  std::memcpy(&header_, at(0), sizeof(header_));
  if (std::memcmp(header_.magic, kKvFileMagic, sizeof(header_.magic)) != 0) {
    return fail(Code::kCorrupt, "'{}' is not a KV file: it does not begin with \"{}\"", path(), kKvFileMagic);
  }
  if (header_.checksum != kv_checksum(&header_, offsetof(KvFileHeader, checksum))) {
    return damaged("the header does not match its sum");
  }
  if (header_.version != kKvFileVersion || header_.header_bytes != sizeof(header_) || header_.reserved != 0) {
    return fail(Code::kUnsupported, "KV file '{}' has format {}, this longkv reads {}; save it anew", path(),
                header_.version, kKvFileVersion);
  }
  std::memcpy(&footer_, at(size - sizeof(footer_)), sizeof(footer_));
  if (std::memcmp(footer_.magic, kKvFooterMagic, sizeof(footer_.magic)) != 0) {
    return damaged(fmt::format("its {} bytes do not end with a footer: it was cut, or never finished", size));
  }
  if (footer_.checksum != kv_checksum(&footer_, offsetof(KvFileFooter, checksum))) {
    return damaged("the footer does not match its sum");
  }
  const uint64_t end = size - sizeof(footer_);
  if (footer_.file_bytes != size) {
    return damaged(fmt::format("the footer says {} bytes, the file has {}", footer_.file_bytes, size));
  }
  const auto directory_end = checked_add(footer_.directory_offset, footer_.directory_bytes);
  if (footer_.reserved != 0 || footer_.directory_offset < sizeof(header_) || !directory_end || *directory_end != end) {
    return damaged("the directory lies outside of the file");
  }
  if (footer_.directory_checksum != kv_checksum(at(footer_.directory_offset), footer_.directory_bytes)) {
    return damaged("the directory does not match its sum");
  }
  if (footer_.entries > kMostEntries || footer_.entries * sizeof(KvEntry) > footer_.directory_bytes) {
    return damaged(
        fmt::format("a directory of {} bytes cannot have {} entries", footer_.directory_bytes, footer_.entries));
  }
  uint64_t position = footer_.directory_offset, data_end = sizeof(header_);
  for (uint64_t i = 0; i < footer_.entries; ++i) {
    Segment segment;
    if (end - position < sizeof(KvEntry)) return damaged("the directory ends inside of an entry");
    std::memcpy(&segment.entry, at(position), sizeof(KvEntry));
    position += sizeof(KvEntry);
    const KvEntry& e = segment.entry;
    if (e.name_bytes == 0 || end - position < uint64_t(round_up(e.name_bytes, 8))) {
      return damaged("the directory ends inside of a name");
    }
    segment.name.assign(reinterpret_cast<const char*>(at(position)), e.name_bytes);
    position += uint64_t(round_up(e.name_bytes, 8));
    const bool raw = e.encoding == uint32_t(KvEncoding::kRaw), zstd = e.encoding == uint32_t(KvEncoding::kZstd);
    const bool is_pages = e.kind == uint16_t(KvSegmentKind::kPages);
    const uint64_t own = e.size - e.base_bytes;
    const bool good = e.offset >= data_end && e.offset <= footer_.directory_offset &&
                      e.stored <= footer_.directory_offset - e.offset && e.base_bytes <= e.size && (raw || zstd) &&
                      (is_pages || (e.kind == uint16_t(KvSegmentKind::kValues) && e.base_bytes == 0)) &&
                      (!raw || e.stored == own) && (!is_pages || e.size % kKvFilePage == 0) &&
                      e.base_bytes % kKvFilePage == 0 && (e.base_bytes == 0 || !header_.base.none()) &&
                      (!raw || !is_pages || own == 0 || e.offset % kKvFilePage == 0);
    if (!good) return damaged(fmt::format("entry {} of the directory contradicts the format", i));
    data_end = e.offset + e.stored;
    if (!by_name_.emplace(segment.name, segments_.size()).second) {
      return damaged(fmt::format("two segments have the same name, entry {}", i));
    }
    segments_.push_back(std::move(segment));
  }
  if (position != end) return damaged("the directory is longer than its entries");
  return {};
}

Status KvFile::set_base(std::shared_ptr<const KvFile> base) {
  if (base->id() != header_.base || header_.base.none()) {
    return fail(Code::kInvalidArgument, "KV file '{}' continues {}, not {}", path(), header_.base.hex(),
                base->id().hex());
  }
  base_ = std::move(base);
  return {};
}

const KvEntry* KvFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &segments_[found->second].entry;
}

Status KvFile::unpack(const Segment& segment, uint8_t* data) const {
  const KvEntry& e = segment.entry;
  const uint64_t own = e.size - e.base_bytes;
  if (own == 0) return {};  // `data` may be null
  if (e.encoding == uint32_t(KvEncoding::kRaw)) {
    std::memcpy(data, at(e.offset), size_t(own));
  } else {
    const size_t n = ZSTD_decompress(data, size_t(own), at(e.offset), size_t(e.stored));
    if (ZSTD_isError(n) != 0 || n != own)
      return damaged(fmt::format("segment '{}' cannot be decompressed", segment.name));
  }
  return {};
}

Status KvFile::read(std::string_view name, void* data, uint64_t n) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    return fail(Code::kCorrupt, "KV file '{}' has no segment '{}'; it was made for other settings", path(), name);
  }
  const Segment& segment = segments_[found->second];
  const KvEntry& e = segment.entry;
  if (e.kind != uint16_t(KvSegmentKind::kValues) || e.size != n) {
    return fail(Code::kCorrupt, "KV file '{}': segment '{}' has {} bytes, {} were expected", path(), name, e.size, n);
  }
  LONGKV_TRY(unpack(segment, static_cast<uint8_t*>(data)));
  if (kv_checksum(data, n) != e.checksum) return damaged(fmt::format("segment '{}' does not match its sum", name));
  return {};
}

Result<std::string> KvFile::text(std::string_view name, uint64_t most) const {
  const KvEntry* entry = find(name);
  if (entry == nullptr || entry->size > most) {
    return damaged(fmt::format("segment '{}' is {}", name, entry == nullptr ? "missing" : "too large"));
  }
  std::string value(size_t(entry->size), '\0');
  LONGKV_TRY(read(name, value.data(), value.size()));
  return value;
}

std::vector<KvFilePart> KvFile::parts(std::string_view name) const {
  std::vector<KvFilePart> parts;
  const KvEntry* e = find(name);
  if (e == nullptr || e->kind != uint16_t(KvSegmentKind::kPages)) return parts;
  if (e->base_bytes > 0) {
    if (!base_) return parts;
    uint64_t left = e->base_bytes;
    for (KvFilePart part : base_->parts(name)) {
      part.bytes = std::min(part.bytes, left);
      left -= part.bytes;
      if (part.bytes > 0) parts.push_back(part);
    }
    if (left > 0) return parts;
  }
  if (e->encoding == uint32_t(KvEncoding::kRaw) && e->stored > 0) {
    parts.push_back({at(e->offset), e->stored, fd(), e->offset});
  }
  return parts;
}

Status KvFile::verify_gaps() const {
  uint64_t position = sizeof(KvFileHeader);
  for (const Segment& segment : segments_) {
    if (!all_zero(at(position), segment.entry.offset - position)) {
      return damaged(fmt::format("bytes before segment '{}' are not zero", segment.name));
    }
    position = segment.entry.offset + segment.entry.stored;
  }
  if (!all_zero(at(position), footer_.directory_offset - position)) {
    return damaged("bytes before the directory are not zero");
  }
  // Names are filled up with zeros.
  uint64_t entry = footer_.directory_offset;
  for (const Segment& segment : segments_) {
    const uint64_t name_end = entry + sizeof(KvEntry) + segment.name.size();
    entry += sizeof(KvEntry) + uint64_t(round_up(int64_t(segment.name.size()), 8));
    if (!all_zero(at(name_end), entry - name_end)) return damaged("names in the directory are not filled with zeros");
  }
  return {};
}

Status KvFile::verify(ThreadPool& pool) const {
  LONGKV_TRY(verify_gaps());
  std::atomic<int64_t> bad{-1};
  pool.run(int64_t(segments_.size()), [&](int64_t i, int) {
    const Segment& segment = segments_[size_t(i)];
    const KvEntry& e = segment.entry;
    bool good = false;
    if (e.encoding == uint32_t(KvEncoding::kRaw)) {
      good = kv_checksum(at(e.offset), e.stored) == e.checksum;
    } else if (ZSTD_getFrameContentSize(at(e.offset), size_t(e.stored)) == e.size - e.base_bytes) {
      std::vector<uint8_t> content(size_t(e.size - e.base_bytes));
      good = unpack(segment, content.data()).ok() && kv_checksum(content.data(), content.size()) == e.checksum;
    }
    if (!good) bad.store(i);
  });
  if (bad >= 0) return damaged(fmt::format("segment '{}' does not match its sum", segments_[size_t(bad)].name));
  return {};
}

}  // namespace longkv
