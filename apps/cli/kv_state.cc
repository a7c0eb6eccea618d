#include "kv_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/log.h"
#include "engine/kv_file.h"
#include "help.h"
#include "kv/file/format.h"

namespace longkv::cli {

namespace {

// A state of longkv's, or an empty file that was made to become one.
bool may_be_replaced(const std::string& path) {
  char magic[sizeof(kKvFileMagic) - 1] = {};
  std::ifstream file(path, std::ios::binary);
  file.read(magic, sizeof(magic));
  return file.gcount() == 0 || std::string_view(magic, sizeof(magic)) == kKvFileMagic;
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
  for (const std::string& path : {o.save, o.cache}) {
    if (!path.empty()) LONGKV_TRY(AtomicFile::create(path).status());
  }
  return {};
}

Result<int64_t> restore_kv(const KvStateOptions& o, Session& session, std::span<const int32_t> ids) {
  const bool cache = !o.cache.empty();
  const std::string& path = cache ? o.cache : o.restore;
  if (path.empty()) return int64_t(0);
  if (cache && !std::filesystem::exists(path)) return int64_t(0);
  KvRestoreOptions options;
  options.verify = !o.no_verify;
  const auto restored = restore_session(session, path, options);
  if (!restored.ok()) {
    // Only a state of longkv's is replaced: anything else under that name was put there by someone.
    if (!cache || !may_be_replaced(path)) return restored.status();
    LONGKV_TRY(notice(restored.status().message() + "; the whole prompt is read"));
    return int64_t(0);
  }
  const std::vector<int32_t>& held = session.ids();
  const auto same = int64_t(std::mismatch(held.begin(), held.end(), ids.begin(), ids.end()).first - held.begin());
  // The last token of the prompt is read in any case: its logits are wanted.
  const int64_t usable = std::min(same, int64_t(ids.size()) - 1);
  const Status cut = usable < session.tokens() ? session.truncate(usable) : Status();
  if (cut.ok() && usable > 0) {
    log_info("{}: {} of {} tokens need not be read", path, usable, ids.size());
    return usable;
  }
  const std::string why =
      usable == 0 ? fmt::format("'{}' holds {} tokens, of which none begins this prompt", path, restored->tokens)
                  : fmt::format("'{}' shares {} tokens with this prompt: {}", path, usable, cut.message());
  LONGKV_TRY(session.truncate(0));
  if (!cache) return fail(Code::kInvalidArgument, "{}", why);
  LONGKV_TRY(notice(why + "; the whole prompt is read"));
  return int64_t(0);
}

Status save_kv(const KvStateOptions& o, Session& session) {
  const std::string& path = o.cache.empty() ? o.save : o.cache;
  if (path.empty()) return {};
  LONGKV_ASSIGN(const uint64_t bytes, save_session(session, path, o.compress));
  log_info("saved {} tokens to {}, {:.1f} MB", session.tokens(), path, double(bytes) / 1e6);
  return {};
}

}  // namespace longkv::cli
