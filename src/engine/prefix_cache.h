// Stored beginnings of prompts: what was read once need not be read again, in this process or the next.
//
// An entry is the state of a session after some tokens, as a KV file: in memory (a file without a place on disk), in a
// folder, or both. Tokens are named in blocks of 128 by a chain of hashes whose root holds everything that the state
// depends on (model, tokenizer, RoPE, recipe, products, piece length, salt), so a lookup walks the new prompt's blocks
// as far as they are known; then the tokens themselves are compared. A hit maps the entry's pages into the session:
// sessions share them until they write, and a page that is written, such as that of the open block, is copied then. An
// entry that continues another one stores only what differs.
//
// Sequences on a card are left alone: nothing is found and nothing stored.
//
// A hit gives the bits of a miss (kv/prefix/reuse.h says how much of an entry that allows). Budgets are in bytes for
// each tier; what leaves memory goes to the folder. The entry that saves the least work for its bytes leaves first, and
// ages when others come; one that others continue stays as long as they do.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/portions.h"
#include "engine/session.h"
#include "kv/file/format.h"
#include "longkv/status.h"

namespace longkv {

// Of the first `most` tokens that a stored state shares with a prompt of `prompt` tokens, those that can be taken over
// with the bits of reading the prompt at once. 0 under recipes whose states cannot be cut (kv/prefix/reuse.h).
int64_t exact_cut(const Session& session, int64_t most, int64_t prompt);

struct PrefixCacheOptions {
  uint64_t ram_bytes = 0;
  std::string folder = {};  // empty: no disk tier. Made for the owner alone if absent
  uint64_t disk_bytes = 0;
  int64_t min_tokens = 128;  // shorter prefixes are neither stored nor used
  // Also take over what no miss would give bit for bit: rows of decoded tokens, and whole states of recipes that cannot
  // be cut, from which the session goes on like a next turn.
  bool continue_turns = false;
};

struct PrefixCacheStats {
  int64_t lookups = 0;
  int64_t hits = 0;
  int64_t tokens_asked = 0;
  int64_t tokens_hit = 0;
  int64_t stored = 0;         // entries made
  int64_t evicted_ram = 0;    // ... that left memory
  int64_t evicted_disk = 0;   // ... and the folder
  int64_t ignored_files = 0;  // of the folder: damaged, of another version, or without their base
  int64_t entries_ram = 0, entries_disk = 0;
  uint64_t bytes_ram = 0, bytes_disk = 0;
};

class PrefixCache {
 public:
  // Takes note of what the folder holds; bad files are ignored with a notice. Errors: kIo, kInvalidArgument (a folder
  // that others may write to: who can write there decides what sessions hold).
  static Result<std::unique_ptr<PrefixCache>> create(const PrefixCacheOptions& options);
  ~PrefixCache();

  // Tokens of the prompt `ids` that lookup() would give the session.
  int64_t usable(const Session& session, std::span<const int32_t> ids, std::string_view salt = {});
  // Puts the longest usable stored prefix of `ids` into the session, which then holds that many tokens: ids.size() with
  // its logits where the whole prompt is known, 0 on a miss. What the session held is replaced. A damaged entry is
  // dropped with a notice and the next best taken. Errors: kOutOfMemory, kInternal; the session holds what it held.
  Result<int64_t> lookup(Session& session, std::span<const int32_t> ids, std::string_view salt = {});
  // Stores the session's state, best right after a prompt was read. Nothing happens when it is known already, shorter
  // than min_tokens, or too large for both tiers. Between pieces of the copy it calls `pause`; whoever else calls the
  // cache waits until it has ended. Errors: kIo, kOutOfMemory; the cache stays usable.
  Status insert(Session& session, std::string_view salt = {}, const Pause& pause = {});
  // Writes to the folder what it does not hold yet. Not flushed to the device: see docs/kv-file.md.
  Status flush();
  // The same for one entry; whether there may be more. What the folder had no room for is not written again until it is
  // used.
  Result<bool> write_one();
  // Forgets everything, in memory and in the folder.
  Status clear();

  PrefixCacheStats stats() const;

 private:
  struct Impl;
  explicit PrefixCache(std::unique_ptr<Impl> impl);

  mutable std::mutex mutex_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longkv
