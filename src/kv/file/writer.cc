#define XXH_INLINE_ALL
#include "kv/file/writer.h"

#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kv/file/reader.h"

namespace longkv {

namespace {

constexpr int kZstdLevel = 3;
// Segments below gain nothing.
constexpr uint64_t kSmallestCompressed = 512;
constexpr uint8_t kZeros[4096] = {};
// Bytes that are summed and handed on together.
constexpr uint64_t kBlock = 256 << 10;

}  // namespace

KvFileWriter::KvFileWriter(Sink sink, const KvWriteOptions& options)
    : KvState(false), sink_(std::move(sink)), options_(options) {
  KvFileHeader header{};
  std::memcpy(header.magic, kKvFileMagic, sizeof(header.magic));
  header.version = kKvFileVersion;
  header.header_bytes = sizeof(header);
  header.id = options_.id;
  if (options_.base) header.base = options_.base->id();
  header.checksum = kv_checksum(&header, offsetof(KvFileHeader, checksum));
  put(&header, sizeof(header));
}

void KvFileWriter::put(const void* data, uint64_t n) {
  if (!ok() || n == 0) return;
  const Status written = sink_({static_cast<const uint8_t*>(data), size_t(n)});
  if (!written.ok()) return refuse(written.code(), written.message());
  position_ += n;
}

void KvFileWriter::put_zeros(uint64_t n) {
  for (uint64_t done = 0; done < n && ok();) {
    const uint64_t count = std::min<uint64_t>(n - done, sizeof(kZeros));
    put(kZeros, count);
    done += count;
  }
}

void KvFileWriter::align(uint64_t to) { put_zeros((to - position_ % to) % to); }

void KvFileWriter::text(std::string_view name, const std::string& value) {
  std::vector<char> characters(value.begin(), value.end());
  list(name, characters, characters.size());
}

void KvFileWriter::bytes(const std::string& name, void* data, uint64_t n) {
  const Piece piece{static_cast<const uint8_t*>(data), n};
  segment(name, KvSegmentKind::kValues, {&piece, 1});
}

uint64_t KvFileWriter::size_of(const std::string&) { return 0; }

void KvFileWriter::pages(const std::string& name, VirtualArray& array, std::span<const ByteRange> live) {
  std::vector<Piece> pieces;
  size_t next = 0;
  for (const ByteRange& span : page_spans(live)) {
    uint64_t at = span.begin;
    for (; next < live.size() && live[next].begin < span.end; ++next) {
      if (live[next].begin >= live[next].end) continue;
      if (live[next].begin > at) pieces.push_back({nullptr, live[next].begin - at});
      pieces.push_back({array.data() + live[next].begin, live[next].end - live[next].begin});
      at = live[next].end;
    }
    if (span.end > at) pieces.push_back({nullptr, span.end - at});
  }
  segment(name, KvSegmentKind::kPages, pieces);
}

// Bytes at the beginning, in whole pages, that the base holds as well.
uint64_t KvFileWriter::same_as_base(const std::string& name, std::span<const Piece> pieces) const {
  if (!options_.base) return 0;
  uint64_t same = 0;
  size_t piece = 0;
  uint64_t in_piece = 0;
  for (const KvFilePart& part : options_.base->parts(name)) {
    for (uint64_t done = 0; done < part.bytes;) {
      if (piece == pieces.size()) return same / kKvFilePage * kKvFilePage;
      const uint64_t n = std::min(part.bytes - done, pieces[piece].bytes - in_piece);
      const uint8_t* theirs = part.data + done;
      if (pieces[piece].data != nullptr) {
        const uint8_t* ours = pieces[piece].data + in_piece;
        if (std::memcmp(ours, theirs, size_t(n)) != 0) {
          same += uint64_t(std::mismatch(ours, ours + n, theirs).first - ours);
          return same / kKvFilePage * kKvFilePage;
        }
      } else {
        const auto zeros = uint64_t(std::find_if(theirs, theirs + n, [](uint8_t b) { return b != 0; }) - theirs);
        if (zeros < n) return (same + zeros) / kKvFilePage * kKvFilePage;
      }
      same += n;
      done += n;
      in_piece += n;
      if (in_piece == pieces[piece].bytes) ++piece, in_piece = 0;
    }
  }
  return same / kKvFilePage * kKvFilePage;
}

void KvFileWriter::segment(const std::string& name, KvSegmentKind kind, std::span<const Piece> pieces) {
  if (!ok()) return;
  KvEntry entry{};
  entry.kind = uint16_t(kind);
  entry.name_bytes = uint16_t(name.size());
  for (const Piece& piece : pieces) entry.size += piece.bytes;
  std::vector<Piece> own(pieces.begin(), pieces.end());
  if (kind == KvSegmentKind::kPages && (entry.base_bytes = same_as_base(name, pieces)) > 0) {
    uint64_t skip = entry.base_bytes;
    while (!own.empty() && own.front().bytes <= skip) {
      skip -= own.front().bytes;
      own.erase(own.begin());
    }
    if (skip > 0) {
      if (own.front().data != nullptr) own.front().data += skip;
      own.front().bytes -= skip;
    }
  }
  if (!options_.compress || !compressed(entry, own)) {
    if (entry.size > entry.base_bytes) align(kind == KvSegmentKind::kPages ? kKvFilePage : kKvFileAlign);
    entry.offset = position_;
    entry.stored = entry.size - entry.base_bytes;
    XXH3_state_t hash;
    XXH3_64bits_reset(&hash);
    for (const Piece& piece : own) {
      if (piece.data != nullptr) {
        for (uint64_t done = 0; done < piece.bytes && ok(); done += kBlock) {
          const uint64_t n = std::min(piece.bytes - done, kBlock);
          XXH3_64bits_update(&hash, piece.data + done, size_t(n));
          put(piece.data + done, n);
        }
      } else {
        for (uint64_t done = 0; done < piece.bytes; done += sizeof(kZeros)) {
          XXH3_64bits_update(&hash, kZeros, size_t(std::min<uint64_t>(piece.bytes - done, sizeof(kZeros))));
        }
        put_zeros(piece.bytes);
      }
    }
    entry.checksum = XXH3_64bits_digest(&hash);
  }
  entries_.push_back(entry);
  names_.push_back(name);
}

bool KvFileWriter::compressed(KvEntry& entry, std::span<const Piece> pieces) {
  const uint64_t n = entry.size - entry.base_bytes;
  if (n < kSmallestCompressed) return false;
  gathered_.assign(size_t(n), 0);
  uint64_t at = 0;
  for (const Piece& piece : pieces) {
    if (piece.data != nullptr) std::memcpy(gathered_.data() + at, piece.data, size_t(piece.bytes));
    at += piece.bytes;
  }
  packed_.resize(ZSTD_compressBound(gathered_.size()));
  const size_t packed = ZSTD_compress(packed_.data(), packed_.size(), gathered_.data(), gathered_.size(), kZstdLevel);
  if (ZSTD_isError(packed) != 0 || packed >= gathered_.size()) return false;
  align(kKvFileAlign);
  entry.offset = position_;
  entry.stored = packed;
  entry.encoding = uint32_t(KvEncoding::kZstd);
  entry.checksum = kv_checksum(gathered_.data(), gathered_.size());
  put(packed_.data(), packed);
  return true;
}

Status KvFileWriter::finish() {
  LONGKV_TRY(status());
  std::vector<uint8_t> directory;
  const auto add = [&](const void* data, size_t n) {
    const auto* begin = static_cast<const uint8_t*>(data);
    directory.insert(directory.end(), begin, begin + n);
  };
  for (size_t i = 0; i < entries_.size(); ++i) {
    add(&entries_[i], sizeof(KvEntry));
    add(names_[i].data(), names_[i].size());
    directory.resize((directory.size() + 7) / 8 * 8, 0);
  }
  align(kKvFileAlign);
  KvFileFooter footer{};
  std::memcpy(footer.magic, kKvFooterMagic, sizeof(footer.magic));
  footer.directory_offset = position_;
  footer.directory_bytes = directory.size();
  footer.directory_checksum = kv_checksum(directory.data(), directory.size());
  footer.entries = entries_.size();
  footer.file_bytes = position_ + directory.size() + sizeof(footer);
  footer.checksum = kv_checksum(&footer, offsetof(KvFileFooter, checksum));
  put(directory.data(), directory.size());
  put(&footer, sizeof(footer));
  return status();
}

}  // namespace longkv
