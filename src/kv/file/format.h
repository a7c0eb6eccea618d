// Layout of KV files; docs/kv-file.md describes it byte by byte.
//
//   header | segments | directory | footer
//
// All numbers are little-endian. A segment begins on a multiple of 64 bytes, one that is meant to be mapped on a page
// of 4096; gaps are zero. The footer comes last, so a file that was cut or not finished has none.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "kv/state.h"

namespace longkv {

static_assert(std::endian::native == std::endian::little, "KV files hold numbers as this machine does");

inline constexpr uint32_t kKvFileVersion = 1;
inline constexpr uint64_t kKvFileAlign = 64;
inline constexpr uint64_t kKvFilePage = uint64_t(kStatePage);
inline constexpr char kKvFileMagic[9] = "longkvKV";
inline constexpr char kKvFooterMagic[9] = "longkvND";

// Names a stored prefix: a hash of its tokens and of everything that its state depends on. Zero: none.
struct KvFileId {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const KvFileId&) const = default;
  auto operator<=>(const KvFileId&) const = default;
  bool none() const { return low == 0 && high == 0; }
  std::string hex() const;
};

struct KvFileHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  KvFileId id;    // of this file in a prefix cache
  KvFileId base;  // of the file that holds the beginnings of some segments; zero: none
  uint64_t reserved;
  uint64_t checksum;  // of the bytes before
};
static_assert(sizeof(KvFileHeader) == 64);

struct KvFileFooter {
  char magic[8];
  uint64_t directory_offset;
  uint64_t directory_bytes;
  uint64_t directory_checksum;
  uint64_t entries;
  uint64_t file_bytes;
  uint64_t reserved;
  uint64_t checksum;  // of the bytes before
};
static_assert(sizeof(KvFileFooter) == 64);

enum class KvEncoding : uint32_t { kRaw = 0, kZstd = 1 };
enum class KvSegmentKind : uint16_t {
  kValues = 0,
  kPages = 1,  // whole pages of an array
};

// An entry of the directory; its name follows, filled up with zeros to a multiple of 8 bytes.
struct KvEntry {
  uint64_t offset;      // of the stored bytes
  uint64_t stored;      // bytes in this file
  uint64_t size;        // bytes of the content, those of the base included
  uint64_t base_bytes;  // first bytes of the content, which are those of the base file's segment
  uint64_t checksum;    // of the content held here, not encoded
  uint32_t encoding;
  uint16_t kind;
  uint16_t name_bytes;
};
static_assert(sizeof(KvEntry) == 48);

// XXH3, 64 bits.
uint64_t kv_checksum(const void* data, uint64_t bytes);

// The whole pages that cover ascending ranges, each once.
std::vector<ByteRange> page_spans(std::span<const ByteRange> live);

}  // namespace longkv
