#include "engine/prefix_store.h"

#define XXH_INLINE_ALL
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/log.h"

namespace longkv {

namespace {

// Longer chains of bases would make a lookup open many files.
constexpr int kMostBases = 8;
// Bytes that are written to the folder together.
constexpr size_t kPersistBlock = 1 << 20;

Result<int> memory_file() {
  const int fd = ::memfd_create("longkv-prefix", MFD_CLOEXEC);
  if (fd < 0) return fail(Code::kOutOfMemory, "no memory for a prefix: {}", std::strerror(errno));
  return fd;
}

Status write_all(int fd, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), std::min<size_t>(bytes.size(), size_t(1) << 30));
    if (n < 0) {
      if (errno == EINTR) continue;
      return fail(Code::kOutOfMemory, "no memory for a prefix: {}", std::strerror(errno));
    }
    bytes = bytes.subspan(size_t(n));
  }
  return {};
}

}  // namespace

KvFileId chain_hash(const KvFileId& before, std::span<const int32_t> ids) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, &before, sizeof(before));
  XXH3_128bits_update(&state, ids.data(), ids.size_bytes());
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {hash.low64, hash.high64 | 1};  // never none
}

std::vector<KvFileId> block_hashes(const KvFileId& root, std::span<const int32_t> ids) {
  std::vector<KvFileId> hashes;
  KvFileId hash = root;
  for (size_t at = 0; at + kPrefixBlock <= ids.size(); at += kPrefixBlock) {
    hash = chain_hash(hash, ids.subspan(at, kPrefixBlock));
    hashes.push_back(hash);
  }
  return hashes;
}

PrefixEntry* PrefixStore::find(const KvFileId& id) {
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : &found->second;
}

const std::set<KvFileId>& PrefixStore::holders(const KvFileId& block) const {
  static const std::set<KvFileId> kNone;
  const auto found = blocks_.find(block);
  return found == blocks_.end() ? kNone : found->second;
}

void PrefixStore::index(const PrefixEntry& entry) {
  for (const KvFileId& block : block_hashes(entry.root, entry.ids)) blocks_[block].insert(entry.id);
}

void PrefixStore::touch(PrefixEntry& entry) {
  const double bytes = double(std::max<uint64_t>(1, std::max(entry.ram_bytes, entry.disk_bytes)));
  entry.priority = clock_ + entry.work / bytes;
  entry.used = ++uses_;
  entry.no_room = false;
  if (PrefixEntry* base = find(entry.base)) touch(*base);
}

Status PrefixStore::add(PrefixEntry entry, PrefixEntry* base, Session& session, const Pause& pause) {
  const auto most = uint64_t(session.kv().cache().bytes_used() + session.kv().index_bytes_held());
  const bool in_ram = most <= options_.ram_bytes;
  if (!in_ram && (options_.folder.empty() || most > options_.disk_bytes)) return {};
  KvWriteOptions write;
  write.id = entry.id;
  if (base != nullptr && open_file(*base).ok() && base->file->depth() < kMostBases) {
    write.base = base->file;
    entry.base = base->id;
  } else {
    base = nullptr;
  }
  const auto put = [&](KvFileWriter& writer) -> Status {
    uint64_t numbers[4] = {entry.root.low, entry.root.high, uint64_t(entry.shortest),
                           std::bit_cast<uint64_t>(entry.work)};
    writer.values("prefix", numbers);
    LONGKV_TRY(write_session(session, writer));
    return writer.finish();
  };
  if (in_ram) {
    LONGKV_ASSIGN(const int fd, memory_file());
    const auto sink = [&](std::span<const uint8_t> bytes) {
      pause_at(pause);
      return write_all(fd, bytes);
    };
    KvFileWriter writer(sink, write);
    if (Status written = put(writer); !written.ok()) {
      ::close(fd);
      return written;
    }
    LONGKV_ASSIGN(entry.file, KvFile::adopt(fd, "prefix in memory"));
    entry.ram_bytes = entry.file->bytes() + entry.ids.size() * sizeof(int32_t);
  } else {
    LONGKV_ASSIGN(AtomicFile file, AtomicFile::create(path_of(entry.id)));
    const auto sink = [&](std::span<const uint8_t> bytes) {
      pause_at(pause);
      return file.write(bytes);
    };
    KvFileWriter writer(sink, write);
    LONGKV_TRY(put(writer));
    LONGKV_TRY(file.commit(/*durable=*/false));
    LONGKV_ASSIGN(entry.file, KvFile::open(path_of(entry.id)));
    entry.disk_bytes = entry.file->bytes();
  }
  if (write.base) LONGKV_TRY(entry.file->set_base(write.base));
  entry.verified = true;
  PrefixEntry& placed = entries_[entry.id] = std::move(entry);
  index(placed);
  touch(placed);
  ++counts_.stored;
  make_room(pause);
  return {};
}

Status PrefixStore::open_file(PrefixEntry& entry) {
  if (entry.file) return {};
  LONGKV_ASSIGN(const std::shared_ptr<KvFile> file, KvFile::open(path_of(entry.id)));
  if (file->id() != entry.id) return fail(Code::kCorrupt, "'{}' holds another prefix than its name says", file->path());
  if (!entry.base.none()) {
    PrefixEntry* base = find(entry.base);
    if (base == nullptr) return fail(Code::kCorrupt, "'{}' continues a file that is gone", file->path());
    LONGKV_TRY(open_file(*base));
    LONGKV_TRY(file->set_base(base->file));
  }
  entry.file = file;
  return {};
}

Result<std::shared_ptr<const KvFile>> PrefixStore::open(PrefixEntry& entry, ThreadPool& pool) {
  LONGKV_TRY(open_file(entry));
  for (PrefixEntry* e = &entry; e != nullptr; e = find(e->base)) {
    if (e->verified) continue;
    LONGKV_TRY(e->file->verify(pool));
    e->verified = true;
  }
  return std::shared_ptr<const KvFile>(entry.file);
}

// Also of its bases, first.
Status PrefixStore::persist(PrefixEntry& entry, const Pause& pause) {
  if (entry.disk_bytes > 0) return {};
  if (PrefixEntry* base = find(entry.base)) LONGKV_TRY(persist(*base, pause));
  LONGKV_ASSIGN(AtomicFile file, AtomicFile::create(path_of(entry.id)));
  const std::span<const uint8_t> content = entry.file->content();
  for (size_t done = 0; done < content.size(); done += kPersistBlock) {
    pause_at(pause);
    LONGKV_TRY(file.write(content.subspan(done, std::min(kPersistBlock, content.size() - done))));
  }
  LONGKV_TRY(file.commit(/*durable=*/false));
  entry.disk_bytes = entry.file->bytes();
  return {};
}

Status PrefixStore::flush() {
  if (options_.folder.empty()) return {};
  for (auto& [id, entry] : entries_) LONGKV_TRY(persist(entry));
  make_room();
  return {};
}

Result<bool> PrefixStore::write_one() {
  if (options_.folder.empty()) return false;
  for (auto& [id, entry] : entries_) {
    if (entry.disk_bytes > 0 || entry.no_room) continue;
    LONGKV_TRY(persist(entry));
    make_room();
    return true;
  }
  return false;
}

void PrefixStore::erase(const KvFileId& id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  PrefixEntry& entry = found->second;
  for (const KvFileId& block : block_hashes(entry.root, entry.ids)) {
    const auto holders = blocks_.find(block);
    if (holders == blocks_.end()) continue;
    holders->second.erase(id);
    if (holders->second.empty()) blocks_.erase(holders);
  }
  if (entry.disk_bytes > 0) ::unlink(path_of(id).c_str());
  entries_.erase(found);
}

void PrefixStore::drop(const KvFileId& id) {
  std::vector<KvFileId> children;
  for (const auto& [other, entry] : entries_) {
    if (entry.base == id) children.push_back(other);
  }
  for (const KvFileId& child : children) drop(child);
  erase(id);
}

Status PrefixStore::clear() {
  std::vector<KvFileId> all;
  for (const auto& [id, entry] : entries_) all.push_back(id);
  for (const KvFileId& id : all) erase(id);
  return {};
}

// Of the entries in a tier that no other continues there, the one of least priority.
PrefixEntry* PrefixStore::least(bool in_ram) {
  std::map<KvFileId, int> continued;
  for (const auto& [id, entry] : entries_) {
    if (!entry.base.none() && (in_ram ? entry.ram_bytes > 0 : true)) ++continued[entry.base];
  }
  PrefixEntry* found = nullptr;
  for (auto& [id, entry] : entries_) {
    if ((in_ram ? entry.ram_bytes : entry.disk_bytes) == 0 || continued.contains(id)) continue;
    const bool less =
        found == nullptr || std::pair(entry.priority, entry.used) < std::pair(found->priority, found->used);
    if (less) found = &entry;
  }
  return found;
}

// The folder's files are opened when they are wanted; those that continue this one hold it open.
void PrefixStore::close_files(const KvFileId& id) {
  for (auto& [other, entry] : entries_) {
    if (other != id && entry.base != id) continue;
    const bool open = entry.file != nullptr;
    entry.file.reset();
    if (other != id && open) close_files(other);
  }
}

void PrefixStore::make_room(const Pause& pause) {
  const auto sum = [&](uint64_t PrefixEntry::*bytes) {
    uint64_t total = 0;
    for (const auto& [id, entry] : entries_) total += entry.*bytes;
    return total;
  };
  while (sum(&PrefixEntry::ram_bytes) > options_.ram_bytes) {
    PrefixEntry* entry = least(/*in_ram=*/true);
    if (entry == nullptr) break;
    clock_ = std::max(clock_, entry->priority);
    ++counts_.evicted_ram;
    const Status kept = options_.folder.empty() ? fail(Code::kIo, "no folder") : persist(*entry, pause);
    if (!kept.ok()) {
      if (!options_.folder.empty())
        log_info("prefix cache: {}; {} tokens are forgotten", kept.message(), entry->ids.size());
      erase(entry->id);
      continue;
    }
    entry->ram_bytes = 0;
    close_files(entry->id);
  }
  while (sum(&PrefixEntry::disk_bytes) > options_.disk_bytes) {
    PrefixEntry* entry = least(/*in_ram=*/false);
    if (entry == nullptr) break;
    clock_ = std::max(clock_, entry->priority);
    ++counts_.evicted_disk;
    if (entry->ram_bytes == 0) {
      erase(entry->id);
    } else {
      ::unlink(path_of(entry->id).c_str());
      entry->disk_bytes = 0;
      entry->no_room = true;
    }
  }
}

Status PrefixStore::open_folder() {
  if (options_.folder.empty()) return {};
  if (::mkdir(options_.folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return fail(Code::kIo, "cannot make the folder '{}': {}", options_.folder, std::strerror(errno));
  }
  struct stat st {};
  if (::stat(options_.folder.c_str(), &st) != 0 || !S_ISDIR(st.st_mode)) {
    return fail(Code::kIo, "'{}' is not a folder", options_.folder);
  }
  if (st.st_uid != ::geteuid() || (st.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return fail(Code::kInvalidArgument,
                "others may write to '{}', and so decide what the model remembers; use a folder of mode 0700 or 0755 "
                "that is yours",
                options_.folder);
  }
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(options_.folder, error)) {
    if (file.path().extension() == ".kv") paths.push_back(file.path().string());
  }
  if (error) return fail(Code::kIo, "cannot read the folder '{}': {}", options_.folder, error.message());
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) {
    const Status loaded = load(path);
    if (loaded.ok()) continue;
    ++counts_.ignored_files;
    LONGKV_TRY(notice(loaded.message() + "; the prefix cache ignores it"));
  }
  link_bases();
  make_room();
  return {};
}

Status PrefixStore::load(const std::string& path) {
  LONGKV_ASSIGN(const std::shared_ptr<KvFile> file, KvFile::open(path));
  if (path != path_of(file->id())) {
    return fail(Code::kCorrupt, "'{}' holds another prefix than its name says", path);
  }
  uint64_t numbers[4] = {};
  LONGKV_TRY(file->read("prefix", numbers, sizeof(numbers)));
  LONGKV_ASSIGN(KvFileInfo info, read_kv_info(*file));
  PrefixEntry entry;
  entry.id = file->id();
  entry.root = {numbers[0], numbers[1]};
  entry.shortest = int64_t(std::min<uint64_t>(numbers[2], uint64_t(1) << 40));
  entry.base = file->base_id();
  entry.disk_bytes = file->bytes();
  const auto work = std::bit_cast<double>(numbers[3]);
  entry.work = std::isfinite(work) && work > 0 ? work : 0.0;
  entry.origin = info.origin;
  entry.ids = std::move(info.ids);
  entries_[entry.id] = std::move(entry);
  return {};
}

// What continues a file that is not there is of no use, nor is a chain without an end.
void PrefixStore::link_bases() {
  const auto complete = [&](const PrefixEntry* entry) {
    for (int depth = 0; depth <= kMostBases; ++depth) {
      if (entry->base.none()) return true;
      entry = find(entry->base);
      if (entry == nullptr) return false;
    }
    return false;
  };
  std::vector<KvFileId> useless;
  for (const auto& [id, entry] : entries_) {
    if (!complete(&entry)) useless.push_back(id);
  }
  for (const KvFileId& id : useless) {
    ++counts_.ignored_files;
    (void)notice("'" + path_of(id) + "' continues a file that is gone; the prefix cache ignores it");
    entries_.erase(id);
  }
  for (auto& [id, entry] : entries_) {
    index(entry);
    touch(entry);
  }
}

void PrefixStore::count(PrefixCacheStats& stats) const {
  stats.stored = counts_.stored;
  stats.evicted_ram = counts_.evicted_ram;
  stats.evicted_disk = counts_.evicted_disk;
  stats.ignored_files = counts_.ignored_files;
  for (const auto& [id, entry] : entries_) {
    stats.entries_ram += entry.ram_bytes > 0 ? 1 : 0;
    stats.entries_disk += entry.disk_bytes > 0 ? 1 : 0;
    stats.bytes_ram += entry.ram_bytes;
    stats.bytes_disk += entry.disk_bytes;
  }
}

}  // namespace longkv
