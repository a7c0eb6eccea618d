#include "kv_state.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "engine/kv_file.h"
#include "engine/prefix_cache.h"
#include "help.h"
#include "kv/file/format.h"
#include "kv/prefix/reuse.h"

namespace longkv::cli {

namespace {

// A state of longkv's, or an empty file that was made to become one.
bool may_be_replaced(const std::string& path) {
  const auto file = MappedFile::open(path);
  if (!file.ok()) return false;
  const std::string_view bytes(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size());
  return bytes.empty() || bytes.starts_with(kKvFileMagic);
}

// What is written beside its place and renamed, and mapped when it is read, can be a file only. `also_read`: a device
// will not do either.
Status check_place(const std::string& path, bool also_read) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0 || S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) return {};
  if (!also_read && !S_ISFIFO(st.st_mode) && !S_ISSOCK(st.st_mode)) return {};
  return fail(Code::kIo, "'{}' is not a regular file; a KV state is kept in one", path);
}

// What a restored state and a prompt have in common.
struct Held {
  int64_t tokens = 0;  // that begin this prompt
  bool whole = false;  // it is this very prompt, read at once into an index of the same levels
  bool alike = false;  // the levels of its index are those that reading the prompt anew would choose
};

Held compare(const Session& session, std::span<const int32_t> ids, int64_t levels) {
  const std::vector<int32_t>& held = session.ids();
  Held h;
  h.tokens = int64_t(std::mismatch(held.begin(), held.end(), ids.begin(), ids.end()).first - held.begin());
  h.alike = session.kv().coarse_factor() == levels;
  h.whole = h.alike && held.size() == ids.size() && h.tokens == int64_t(ids.size()) && session.origin().one_prompt;
  return h;
}

}  // namespace

void add_kv_state_options(CLI::App& command, KvStateOptions& o) {
  command.add_option("--kv-save", o.save, "Save the KV state to a file once the prompt was read");
  command.add_option("--kv-restore", o.restore, "Start from a saved KV state whose tokens begin the prompt");
  command.add_option("--prompt-cache", o.cache, "Both, with one file that need not exist yet");
  command.add_flag("--compress", o.compress, "Save with zstd: smaller, but restored by decoding instead of mapping")
      ->group(kMore);
  command.add_flag("--no-verify", o.no_verify, "Do not check the sums of mapped rows: starts without reading them")
      ->group(kMore);
}

Status check_kv_state(const KvStateOptions& o) {
  if (!o.cache.empty() && (!o.save.empty() || !o.restore.empty())) {
    return fail(Code::kInvalidArgument,
                "--prompt-cache saves and restores by itself; leave out --kv-save and --kv-restore");
  }
  if (o.compress && o.save.empty() && o.cache.empty()) LONGKV_TRY(notice("--compress is ignored: nothing is saved"));
  if (o.no_verify && o.restore.empty() && o.cache.empty()) {
    LONGKV_TRY(notice("--no-verify is ignored: nothing is restored"));
  }
  const std::string& target = o.cache.empty() ? o.save : o.cache;
  if (target.empty()) return {};
  LONGKV_TRY(check_place(target, /*also_read=*/!o.cache.empty()));
  LONGKV_TRY(AtomicFile::create(target).status());
  return {};
}

Result<int64_t> restore_kv(const KvStateOptions& o, Session& session, std::span<const int32_t> ids) {
  const bool cache = !o.cache.empty();
  const std::string& path = cache ? o.cache : o.restore;
  if (path.empty()) return int64_t(0);
  std::error_code none;
  if (cache && !std::filesystem::exists(path, none)) return int64_t(0);
  KvRestoreOptions options;
  options.verify = !o.no_verify;
  const int64_t levels = session.kv().coarse_factor();
  const auto restored = restore_session(session, path, options);
  if (!restored.ok()) {
    // Only a state of longkv's is replaced: anything else under that name was put there by someone.
    if (!cache || !may_be_replaced(path)) return restored.status();
    LONGKV_TRY(notice(restored.status().message() + "; the whole prompt is read"));
    return int64_t(0);
  }
  const auto prompt = int64_t(ids.size());
  const Held held = compare(session, ids, levels);
  if (held.whole) {
    log_info("{}: this prompt; none of its {} tokens need be read", path, prompt);
    return prompt;
  }
  const std::string recipe = session.kv().recipe().canonical();
  const PrefixReuse reuse = prefix_reuse(session.kv().recipe());
  // A cache must not change an answer. Who asks for a state gets what can be had of it.
  const int64_t exact = held.alike ? exact_cut(session, std::min(held.tokens, session.origin().exact), prompt) : 0;
  const int64_t usable = cache ? exact : std::min(held.tokens, prompt - reuse.unread);
  Status cut;
  if (usable > 0 && (cache || reuse.rebuild)) {
    // As the beginning of this prompt: what is saved next is then a prompt read at once, and no cut state.
    const KvRestoreOptions beginning{.verify = false, .first_tokens = usable, .rows_only = reuse.rebuild};
    cut = restore_session(session, path, beginning).status();
  } else if (usable > 0 && usable < session.tokens()) {
    cut = session.truncate(usable);
  }
  if (cut.ok() && usable > 0) {
    log_info("{}: {} of {} tokens need not be read", path, usable, prompt);
    if (!reuse.any_length) {
      LONGKV_TRY(
          notice(fmt::format("'{}': what {} keeps, encodes or skips was decided by the end of the {} tokens "
                             "saved, which is not this prompt's; the answer can differ from that of a prompt "
                             "read at once",
                             path, recipe, restored->tokens)));
    }
    return usable;
  }
  std::string why;
  if (held.tokens == 0) {
    why = fmt::format("'{}' holds {} tokens, of which none begins this prompt", path, restored->tokens);
  } else if (cache && !reuse.any_length) {
    why = fmt::format(
        "'{}' holds {} tokens that are not this very prompt; under {} what stays of a prompt depends on "
        "its end",
        path, restored->tokens, recipe);
  } else if (cache && !held.alike) {
    why = fmt::format("'{}' was saved under another context, for which its index has other levels", path);
  } else if (cut.ok()) {
    why = fmt::format("'{}' shares {} tokens with this prompt, too few to go on from with the same bits", path,
                      held.tokens);
  } else {
    why = fmt::format("'{}' shares {} tokens with this prompt: {}", path, held.tokens, cut.message());
  }
  LONGKV_TRY(session.truncate(0));
  if (!cache) return fail(Code::kInvalidArgument, "{}", why);
  LONGKV_TRY(notice(why + "; the whole prompt is read"));
  return int64_t(0);
}

Status save_kv(const KvStateOptions& o, Session& session) {
  const bool cache = !o.cache.empty();
  const std::string& path = cache ? o.cache : o.save;
  if (path.empty()) return {};
  const auto bytes = save_session(session, path, o.compress);
  if (bytes.ok()) {
    log_info("saved {} tokens to {}, {:.1f} MB", session.tokens(), path, double(*bytes) / 1e6);
    return {};
  }
  return cache ? notice(bytes.status().message() + "; the next prompt is read anew") : bytes.status();
}

}  // namespace longkv::cli
