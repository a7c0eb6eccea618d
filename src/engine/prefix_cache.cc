#include "engine/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "engine/fingerprint.h"
#include "engine/prefix_store.h"
#include "kv/prefix/reuse.h"

namespace longkv {

namespace {

// What of an entry a prompt can take over.
struct Use {
  PrefixEntry* entry = nullptr;
  int64_t tokens = 0;
  bool whole = false;  // the state as it is, else cut
};

KvFileId root_of(const Session& session, std::string_view salt) {
  // Lengths keep the parts apart.
  const std::string text = session_fingerprint(session);
  // The levels of an index may follow from the context; states of other levels would choose other rows.
  std::string all =
      fmt::format("{} {} {} {}\n", text.size(), session.options().chunk, session.kv().coarse_factor(), salt.size());
  all += text;
  all += salt;
  all.resize((all.size() + 3) / 4 * 4, '\0');
  return chain_hash({}, {reinterpret_cast<const int32_t*>(all.data()), all.size() / 4});
}

int64_t common(std::span<const int32_t> a, std::span<const int32_t> b, int64_t from) {
  const auto n = int64_t(std::min(a.size(), b.size()));
  while (from < n && a[size_t(from)] == b[size_t(from)]) ++from;
  return from;
}

// Products of numbers that reading tokens [begin, end) takes, the attention's included.
double work_of(const Session& session, int64_t begin, int64_t end) {
  const ModelConfig& c = session.model().config();
  const double weights =
      double(c.layers) * double(c.dim) * (double(c.heads) * (c.head_dim_k + c.head_dim_v) + 3.0 * double(c.ff_dim));
  const double attention = double(c.layers) * double(c.heads) * double(c.head_dim_k + c.head_dim_v);
  const double n = double(end - begin);
  return n * (weights + attention * 0.5 * double(begin + end));
}

}  // namespace

struct PrefixCache::Impl {
  explicit Impl(const PrefixCacheOptions& o) : options(o), store(o) {}

  Use judge(PrefixEntry& entry, const Session& session, std::span<const int32_t> ids, int64_t shared) const;
  Use best(const Session& session, std::span<const int32_t> ids, std::string_view salt);
  PrefixEntry* base_for(const KvFileId& root, std::span<const int32_t> ids, int64_t& shared);
  Status restore(const Use& use, Session& session);

  PrefixCacheOptions options;
  PrefixStore store;
  PrefixCacheStats stats;
};

PrefixCache::PrefixCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PrefixCache::~PrefixCache() = default;

Result<std::unique_ptr<PrefixCache>> PrefixCache::create(const PrefixCacheOptions& options) {
  PrefixCacheOptions o = options;
  o.min_tokens = std::max(o.min_tokens, kPrefixBlock);
  auto impl = std::make_unique<Impl>(o);
  LONGKV_TRY(impl->store.open_folder());
  return std::unique_ptr<PrefixCache>(new PrefixCache(std::move(impl)));
}

int64_t exact_cut(const Session& session, int64_t most, int64_t prompt) {
  const PrefixReuse reuse = prefix_reuse(session.kv().recipe());
  if (!reuse.any_length) return 0;
  most = std::min(most, prompt - reuse.unread);
  // Queries at the end must come in the same pieces, too.
  if (reuse.unread > 1) most = std::max<int64_t>(0, most) / session.options().chunk * session.options().chunk;
  return most > 0 ? session.resume_point(most, prompt) : 0;
}

// `shared`: tokens that entry and prompt have in common.
Use PrefixCache::Impl::judge(PrefixEntry& entry, const Session& session, std::span<const int32_t> ids,
                             int64_t shared) const {
  const auto held = int64_t(entry.ids.size()), prompt = int64_t(ids.size());
  if (held > session.context()) return {};
  // The same prompt, read at once: all of it, for every recipe.
  if (shared == held && held == prompt && (entry.origin.one_prompt || options.continue_turns)) {
    return {&entry, held, true};
  }
  const PrefixReuse reuse = prefix_reuse(session.kv().recipe());
  Use use{&entry, 0, false};
  if (reuse.any_length) {
    use.tokens = exact_cut(session, options.continue_turns ? shared : std::min(shared, entry.origin.exact), prompt);
    if (use.tokens < held && use.tokens < entry.shortest) use.tokens = 0;
  } else if (options.continue_turns && shared == held) {
    use = {&entry, held, true};
  }
  return use.tokens >= options.min_tokens ? use : Use{};
}

Use PrefixCache::Impl::best(const Session& session, std::span<const int32_t> ids, std::string_view salt) {
  if (session.on_card()) return {};
  const std::vector<KvFileId> hashes = block_hashes(root_of(session, salt), ids);
  size_t known = 0;
  while (known < hashes.size() && !store.holders(hashes[known]).empty()) ++known;
  Use found;
  std::set<KvFileId> seen;
  // From the deepest known block up, as long as an entry that ends there could still be better.
  for (size_t depth = known; depth > 0 && int64_t(depth + 1) * kPrefixBlock > found.tokens; --depth) {
    for (const KvFileId& id : store.holders(hashes[depth - 1])) {
      if (!seen.insert(id).second) continue;
      PrefixEntry* entry = store.find(id);
      const Use use = judge(*entry, session, ids, common(entry->ids, ids, 0));
      if (use.tokens > found.tokens) found = use;
    }
  }
  return found;
}

Status PrefixCache::Impl::restore(const Use& use, Session& session) {
  PrefixEntry& entry = *use.entry;
  LONGKV_ASSIGN(const std::shared_ptr<const KvFile> file, store.open(entry, session.pool()));
  KvRestoreOptions options;
  options.verify = false;  // done once by the store
  if (!use.whole) {
    options.first_tokens = use.tokens;
    options.rows_only = prefix_reuse(session.kv().recipe()).rebuild;
  }
  return restore_session(session, file, options).status();
}

int64_t PrefixCache::usable(const Session& session, std::span<const int32_t> ids, std::string_view salt) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return impl_->best(session, ids, salt).tokens;
}

Result<int64_t> PrefixCache::lookup(Session& session, std::span<const int32_t> ids, std::string_view salt) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Impl& impl = *impl_;
  ++impl.stats.lookups;
  impl.stats.tokens_asked += int64_t(ids.size());
  for (;;) {
    const Use use = impl.best(session, ids, salt);
    if (use.tokens == 0) break;
    const Status restored = impl.restore(use, session);
    if (restored.ok()) {
      impl.store.touch(*use.entry);
      ++impl.stats.hits;
      impl.stats.tokens_hit += use.tokens;
      return use.tokens;
    }
    if (restored.code() != Code::kCorrupt && restored.code() != Code::kIo) return restored;
    const KvFileId id = use.entry->id;
    impl.store.drop(id);
    LONGKV_TRY(notice(restored.message() + "; the prefix cache forgets it"));
  }
  LONGKV_TRY(session.truncate(0));
  return int64_t(0);
}

// The entry that shares most with these tokens, if that is a fair part of them.
PrefixEntry* PrefixCache::Impl::base_for(const KvFileId& root, std::span<const int32_t> ids, int64_t& shared) {
  const std::vector<KvFileId> hashes = block_hashes(root, ids);
  size_t known = 0;
  while (known < hashes.size() && !store.holders(hashes[known]).empty()) ++known;
  shared = int64_t(known) * kPrefixBlock;
  if (known == 0 || shared * 4 < int64_t(ids.size())) return nullptr;
  return store.find(*store.holders(hashes[known - 1]).begin());
}

Status PrefixCache::insert(Session& session, std::string_view salt, const Pause& pause) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Impl& impl = *impl_;
  const std::vector<int32_t>& ids = session.ids();
  const auto n = int64_t(ids.size());
  if (n < impl.options.min_tokens || n != session.tokens() || session.on_card()) return {};
  PrefixEntry entry;
  entry.root = root_of(session, salt);
  entry.id = chain_hash(entry.root, ids);
  entry.origin = session.origin();
  if (PrefixEntry* known = impl.store.find(entry.id)) {
    const bool better =
        (entry.origin.one_prompt && !known->origin.one_prompt) || entry.origin.exact > known->origin.exact;
    if (!better) {
      impl.store.touch(*known);
      return {};
    }
    impl.store.drop(entry.id);
  }
  int64_t shared = 0;
  PrefixEntry* base = impl.base_for(entry.root, ids, shared);
  entry.ids = ids;
  entry.shortest = session.kv().cache().shortest_cut().v;
  entry.work = work_of(session, base != nullptr ? shared : 0, n);
  return impl.store.add(std::move(entry), base, session, pause);
}

Status PrefixCache::flush() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return impl_->store.flush();
}

Result<bool> PrefixCache::write_one() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return impl_->store.write_one();
}

Status PrefixCache::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return impl_->store.clear();
}

PrefixCacheStats PrefixCache::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  PrefixCacheStats stats = impl_->stats;
  impl_->store.count(stats);
  return stats;
}

}  // namespace longkv
