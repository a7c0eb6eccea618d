#define XXH_INLINE_ALL
#include <sys/mman.h>
#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/error.h"
#include "kv/file/reader.h"

namespace longkv {

namespace {

// Bytes that are summed between two pauses.
constexpr size_t kSumBlock = 1 << 20;

}  // namespace

void KvFileLoader::bytes(const std::string& name, void* data, uint64_t n) {
  const Status read = file_->read(name, data, n);
  if (!read.ok()) refuse(read.code(), read.message());
}

uint64_t KvFileLoader::size_of(const std::string& name) {
  const KvEntry* entry = file_->find(name);
  if (entry != nullptr) {
    // A small compressed segment must not make room for a large one.
    const bool packed = entry->encoding == uint32_t(KvEncoding::kZstd);
    return !packed || entry->size / 4096 <= entry->stored ? entry->size : UINT64_MAX;
  }
  refuse(Code::kCorrupt,
         fmt::format("KV file '{}' has no segment '{}'; it was made for other settings", file_->path(), name));
  return 0;
}

void KvFileLoader::pages(const std::string& name, VirtualArray& array, std::span<const ByteRange> live) {
  const std::vector<ByteRange> spans = page_spans(live);
  uint64_t size = 0;
  for (const ByteRange& span : spans) size += span.end - span.begin;
  const KvEntry* entry = file_->find(name);
  if (entry == nullptr || entry->kind != uint16_t(KvSegmentKind::kPages) || entry->size != size) {
    return refuse(
        Code::kCorrupt,
        fmt::format("KV file '{}': segment '{}' has {} bytes, {} were expected; it was made for other settings",
                    file_->path(), name, entry == nullptr ? 0 : entry->size, size));
  }
  if (!spans.empty() && spans.back().end > (array.size() + kKvFilePage - 1) / kKvFilePage * kKvFilePage) {
    return refuse(Code::kInternal, fmt::format("segment '{}' ends outside of its array", name));
  }
  place(name, *file_, 0, size, array, spans);
}

// Puts bytes [from, until) of a segment's content, as `file` has them, where the spans say.
bool KvFileLoader::place(const std::string& name, const KvFile& file, uint64_t from, uint64_t until,
                         VirtualArray& array, std::span<const ByteRange> spans) {
  if (from >= until) return true;
  const KvEntry* e = file.find(name);
  if (e == nullptr || e->size < until || e->kind != uint16_t(KvSegmentKind::kPages)) {
    refuse(Code::kCorrupt, fmt::format("KV file '{}' lacks the beginning of segment '{}'", file.path(), name));
    return false;
  }
  if (from < e->base_bytes) {
    if (!file.base()) {
      refuse(Code::kInvalidArgument, fmt::format("KV file '{}' continues the file {}, which is not at hand",
                                                 file.path(), file.base_id().hex()));
      return false;
    }
    const uint64_t middle = std::min(until, e->base_bytes);
    if (!place(name, *file.base(), from, middle, array, spans)) return false;
    from = middle;
    if (from >= until) return true;
  }
  std::vector<uint8_t> content;
  if (e->encoding != uint32_t(KvEncoding::kRaw)) {
    content.resize(size_t(e->size - e->base_bytes));
    for (const KvFile::Segment& segment : file.segments()) {
      if (segment.name != name) continue;
      Status unpacked = file.unpack(segment, content.data());
      if (unpacked.ok() && kv_checksum(content.data(), content.size()) != e->checksum) {
        unpacked = fail(Code::kCorrupt, "KV file '{}': segment '{}' does not match its sum", file.path(), name);
      }
      if (!unpacked.ok()) {
        refuse(unpacked.code(), unpacked.message());
        return false;
      }
    }
  }
  Check check{name, e->checksum, {}};
  uint64_t at = 0;  // content before the span
  for (const ByteRange& span : spans) {
    const uint64_t begin = std::max(from, at), end = std::min(until, at + span.end - span.begin);
    if (begin < end) {
      const uint64_t target = span.begin + (begin - at), held = begin - e->base_bytes;
      const uint64_t room = array.size() > target ? array.size() - target : 0;
      if (const Status room_made = array.grow(std::min(target + (end - begin), array.size())); !room_made.ok()) {
        refuse(room_made.code(), room_made.message());
        return false;
      }
      if (!content.empty()) {
        std::memcpy(array.data() + target, content.data() + held, size_t(std::min(end - begin, room)));
        copied_ += end - begin;
      } else if (array.map_file(file.fd(), e->offset + held, target, end - begin)) {
        mapped_ += end - begin;
      } else {
        std::vector<KvFilePart> parts = file.parts(name);
        std::memcpy(array.data() + target, parts.back().data + held, size_t(std::min(end - begin, room)));
        copied_ += end - begin;
      }
      check.pieces.emplace_back(array.data() + target, size_t(end - begin));
    }
    at += span.end - span.begin;
  }
  // Rows that a sliding window has let go of need no room on a disk.
  if (array.in_file() && !spans.empty()) array.release(0, spans.front().begin);
  const bool whole = &file == file_.get() && content.empty();
  if (verify_ && whole) checks_.push_back(std::move(check));
  return true;
}

bool KvFileLoader::matches(const Check& check, const Pause& pause) {
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  for (const auto& piece : check.pieces) {
    for (size_t done = 0; done < piece.size(); done += kSumBlock) {
      pause_at(pause);
      const auto block = piece.subspan(done, std::min(kSumBlock, piece.size() - done));
#ifdef MADV_POPULATE_READ
      // One call instead of a fault for every few pages. What it cannot do, the sum's reading does.
      ::madvise(const_cast<uint8_t*>(block.data()), block.size(), MADV_POPULATE_READ);
#endif
      XXH3_64bits_update(&hash, block.data(), block.size());
    }
  }
  return XXH3_64bits_digest(&hash) == check.checksum;
}

Status KvFileLoader::finish(ThreadPool& pool, const Pause& pause) {
  LONGKV_TRY(status());
  if (!verify_) return {};
  LONGKV_TRY(file_->verify_gaps());
  for (const KvFile* base = file_->base().get(); base != nullptr; base = base->base().get()) {
    LONGKV_TRY(base->verify(pool));
  }
  std::atomic<int64_t> bad{-1};
  const auto check = [&](int64_t i, int) {
    if (!matches(checks_[size_t(i)], pause)) bad.store(i);
  };
  const auto checks = int64_t(checks_.size());
  if (pause) {
    for (int64_t i = 0; i < checks; ++i) check(i, 0);
  } else {
    pool.run(checks, check);
  }
  if (bad < 0) return {};
  return fail(Code::kCorrupt, "KV file '{}': segment '{}' does not match its sum; it is damaged, save it anew",
              file_->path(), checks_[size_t(bad)].name);
}

}  // namespace longkv
