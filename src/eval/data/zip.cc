// Zip archives (PKWARE's APPNOTE 6.3): the directory at the end, members by inflate.
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "base/mapped_file.h"
#include "eval/data/record_reader.h"

namespace longkv {

namespace {

constexpr uint32_t kEndMark = 0x06054b50, kDirectoryMark = 0x02014b50, kLocalMark = 0x04034b50;
constexpr size_t kEndBytes = 22, kDirectoryBytes = 46, kLocalBytes = 30, kMaxComment = 65535;

uint32_t little(const uint8_t* p, int bytes) {
  uint32_t v = 0;
  for (int i = 0; i < bytes; ++i) v |= uint32_t(p[i]) << (8 * i);
  return v;
}

class ZipSource : public ByteSource {
 public:
  ZipSource(MappedFile file, std::string name, std::span<const uint8_t> packed, const ZipMember& member)
      : file_(std::move(file)), name_(std::move(name)), packed_(packed), member_(member) {
    // Raw deflate: no zlib header.
    ready_ = member.method == 0 || inflateInit2(&stream_, -MAX_WBITS) == Z_OK;
  }
  ~ZipSource() override {
    if (member_.method != 0 && ready_) inflateEnd(&stream_);
  }
  ZipSource(const ZipSource&) = delete;
  ZipSource& operator=(const ZipSource&) = delete;

  Result<size_t> read(char* bytes, size_t size) override {
    if (!ready_) return fail(Code::kOutOfMemory, "no memory to unpack '{}'", name_);
    if (ended_) return size_t(0);
    size = std::min<size_t>(size, size_t(1) << 20);
    size_t n = 0;
    if (member_.method == 0) {
      n = std::min(size, packed_.size() - used_);
      std::memcpy(bytes, packed_.data() + used_, n);
      used_ += n;
    } else {
      stream_.next_out = reinterpret_cast<Bytef*>(bytes);
      stream_.avail_out = uInt(size);
      while (stream_.avail_out == size) {
        const size_t piece = std::min<size_t>(packed_.size() - used_, size_t(1) << 20);
        stream_.next_in = const_cast<Bytef*>(packed_.data() + used_);  // zlib's interface; it is not written
        stream_.avail_in = uInt(piece);
        const int code = inflate(&stream_, Z_NO_FLUSH);
        used_ += piece - stream_.avail_in;
        if (code == Z_STREAM_END) {
          ended_ = true;
          break;
        }
        if (code != Z_OK) return fail(Code::kCorrupt, "'{}' is damaged near byte {}", name_, done_);
      }
      n = size - stream_.avail_out;
    }
    done_ += n;
    crc_ = uint32_t(crc32(crc_, reinterpret_cast<const Bytef*>(bytes), uInt(n)));
    if (n == 0) ended_ = true;
    if (done_ > member_.bytes || (ended_ && (done_ != member_.bytes || crc_ != member_.crc))) {
      return fail(Code::kCorrupt, "'{}' unpacks to other bytes than the archive's directory says", name_);
    }
    return n;
  }

 private:
  MappedFile file_;
  std::string name_;
  std::span<const uint8_t> packed_;
  ZipMember member_;
  z_stream stream_{};
  bool ready_ = false, ended_ = false;
  size_t used_ = 0;
  uint64_t done_ = 0;
  uint32_t crc_ = 0;
};

}  // namespace

Result<std::vector<ZipMember>> list_zip(const std::string& path) {
  LONGKV_ASSIGN(const MappedFile file, MappedFile::open(path));
  const std::span<const uint8_t> bytes = file.bytes();
  if (bytes.size() < kEndBytes) return fail(Code::kCorrupt, "'{}' is no zip archive", path);
  size_t end = bytes.size() - kEndBytes;
  const size_t first = end > kMaxComment ? end - kMaxComment : 0;
  while (little(bytes.data() + end, 4) != kEndMark) {
    if (end == first) return fail(Code::kCorrupt, "'{}' is no zip archive, or its end is missing", path);
    --end;
  }
  const uint32_t count = little(bytes.data() + end + 10, 2), start = little(bytes.data() + end + 16, 4);
  if (count == 0xffff || start == 0xffffffff)
    return fail(Code::kUnsupported, "'{}' is a zip64 archive; unpack it", path);
  std::vector<ZipMember> members;
  uint64_t at = start;
  for (uint32_t i = 0; i < count; ++i) {
    if (at + kDirectoryBytes > end || little(bytes.data() + at, 4) != kDirectoryMark) {
      return fail(Code::kCorrupt, "'{}' has no entry {} of {} in its directory", path, i + 1, count);
    }
    const uint8_t* p = bytes.data() + at;
    const uint32_t name = little(p + 28, 2), extra = little(p + 30, 2), comment = little(p + 32, 2);
    if (at + kDirectoryBytes + name > end) return fail(Code::kCorrupt, "'{}' has a name beyond its directory", path);
    ZipMember m;
    m.name.assign(reinterpret_cast<const char*>(p + kDirectoryBytes), name);
    if ((little(p + 8, 2) & 1) != 0) return fail(Code::kUnsupported, "'{}' in '{}' is encrypted", m.name, path);
    m.method = int(little(p + 10, 2));
    m.crc = little(p + 16, 4);
    m.packed_bytes = little(p + 20, 4);
    m.bytes = little(p + 24, 4);
    m.offset = little(p + 42, 4);
    at += kDirectoryBytes + name + extra + comment;
    members.push_back(std::move(m));
  }
  return members;
}

Result<std::unique_ptr<ByteSource>> open_zip_member(const std::string& path, const ZipMember& member) {
  const std::string name = path + ":" + member.name;
  if (member.method != 0 && member.method != 8) {
    return fail(Code::kUnsupported, "'{}' is packed by method {}; stored and deflated are known", name, member.method);
  }
  LONGKV_ASSIGN(MappedFile file, MappedFile::open(path));
  const std::span<const uint8_t> bytes = file.bytes();
  if (member.offset + kLocalBytes > bytes.size() || little(bytes.data() + member.offset, 4) != kLocalMark) {
    return fail(Code::kCorrupt, "'{}' does not begin where the directory says", name);
  }
  const uint8_t* p = bytes.data() + member.offset;
  const uint64_t begin = member.offset + kLocalBytes + little(p + 26, 2) + little(p + 28, 2);
  if (begin + member.packed_bytes > bytes.size()) return fail(Code::kCorrupt, "'{}' ends beyond the archive", name);
  const auto packed = bytes.subspan(begin, member.packed_bytes);
  return std::unique_ptr<ByteSource>(new ZipSource(std::move(file), name, packed, member));
}

}  // namespace longkv
