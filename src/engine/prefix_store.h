// The entries of a prefix cache: where their files are, what they cost, and which of them goes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/portions.h"
#include "base/threads.h"
#include "engine/kv_file.h"
#include "engine/prefix_cache.h"

namespace longkv {

// Tokens named by one hash.
inline constexpr int64_t kPrefixBlock = 128;

// A link of the chain: what precedes, then tokens.
KvFileId chain_hash(const KvFileId& before, std::span<const int32_t> ids);
// The hashes of all whole blocks of ids, in order.
std::vector<KvFileId> block_hashes(const KvFileId& root, std::span<const int32_t> ids);

struct PrefixEntry {
  KvFileId id;
  KvFileId root;
  std::vector<int32_t> ids;
  Session::Origin origin;
  int64_t shortest = 1;          // tokens that the state can be cut to, where its recipe allows that
  KvFileId base;                 // none: stands alone
  uint64_t ram_bytes = 0;        // 0: not in memory
  uint64_t disk_bytes = 0;       // 0: not in the folder
  bool no_room = false;          // the folder had none for it
  bool verified = false;         // all sums were checked, or made, by this process
  double work = 0;               // to read its tokens beyond the base, in products of numbers
  double priority = 0;           // the least goes first,
  uint64_t used = 0;             // and of equal ones what was used longest ago
  std::shared_ptr<KvFile> file;  // nullptr: in the folder, not opened yet
};

class PrefixStore {
 public:
  explicit PrefixStore(const PrefixCacheOptions& options) : options_(options) {}
  // Opens the folder. Errors: see PrefixCache::create.
  Status open_folder();

  PrefixEntry* find(const KvFileId& id);
  // Entries that hold a block.
  const std::set<KvFileId>& holders(const KvFileId& block) const;
  // The state as a new entry: into memory, or straight into the folder where memory is too small. `base`: nullptr or
  // the entry that it continues. Then makes room. Errors: kIo, kOutOfMemory.
  Status add(PrefixEntry entry, PrefixEntry* base, Session& session, const Pause& pause);
  // Opens the entry's file with its bases and checks their sums once. Errors: kCorrupt, kIo; the entry is of no use
  // then.
  Result<std::shared_ptr<const KvFile>> open(PrefixEntry& entry, ThreadPool& pool);
  // Forgets an entry and those that continue it, in both tiers.
  void drop(const KvFileId& id);
  void touch(PrefixEntry& entry);
  Status flush();
  Result<bool> write_one();
  Status clear();
  void count(PrefixCacheStats& stats) const;

 private:
  std::string path_of(const KvFileId& id) const { return options_.folder + "/" + id.hex() + ".kv"; }
  Status load(const std::string& path);
  void link_bases();
  void index(const PrefixEntry& entry);
  Status open_file(PrefixEntry& entry);
  Status persist(PrefixEntry& entry, const Pause& pause = {});
  void erase(const KvFileId& id);
  PrefixEntry* least(bool in_ram);
  void close_files(const KvFileId& id);
  void make_room(const Pause& pause = {});

  PrefixCacheOptions options_;
  std::map<KvFileId, PrefixEntry> entries_;
  std::map<KvFileId, std::set<KvFileId>> blocks_;
  double clock_ = 0;  // priority of what went last
  uint64_t uses_ = 0;
  PrefixCacheStats counts_;
};

}  // namespace longkv
