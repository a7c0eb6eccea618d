#include "engine/kv_file.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/atomic_file.h"
#include "base/error.h"
#include "engine/fingerprint.h"

namespace longkv {

namespace {

constexpr uint64_t kMostText = uint64_t(1) << 20;
constexpr uint64_t kMostTokens = uint64_t(1) << 31;

Status check_savable(const Session& session) {
  if (session.options().keeper) {
    return fail(Code::kInvalidArgument, "a keep stage that no recipe names cannot be saved or restored");
  }
  if (int64_t(session.ids().size()) == session.tokens()) return {};
  return fail(Code::kInvalidArgument, "the KV cache holds {} tokens of which {} are known; random rows cannot be saved",
              session.tokens(), session.ids().size());
}

}  // namespace

Status write_session(Session& session, KvFileWriter& writer) {
  if (session.on_card()) return fail(Code::kUnsupported, "a sequence on a card is not saved; read it without -ngl");
  LONGKV_TRY(check_savable(session));
  writer.text("fingerprint", session_fingerprint(session));
  const Session::Origin& origin = session.origin();
  int64_t numbers[3] = {session.context(), origin.exact, origin.one_prompt ? 1 : 0};
  writer.values("session", numbers);
  std::vector<int32_t> ids = session.ids();
  writer.list("tokens", ids, ids.size());
  std::vector<float> logits;
  if (!ids.empty()) logits.assign(session.logits().begin(), session.logits().end());
  writer.list("logits", logits, logits.size());
  {
    const KvState::Level level(writer, "kv");
    session.kv().visit(writer);
  }
  return writer.status();
}

Result<uint64_t> save_session(Session& session, const std::string& path, bool compress, const Pause& pause) {
  LONGKV_ASSIGN(AtomicFile file, AtomicFile::create(path));
  KvWriteOptions options;
  options.compress = compress;
  const auto sink = [&](std::span<const uint8_t> bytes) {
    pause_at(pause);
    return file.write(bytes);
  };
  KvFileWriter writer(sink, options);
  LONGKV_TRY(write_session(session, writer));
  LONGKV_TRY(writer.finish());
  LONGKV_TRY(file.commit());
  return writer.bytes_written();
}

Result<KvFileInfo> read_kv_info(const KvFile& file) {
  KvFileInfo info;
  LONGKV_ASSIGN(info.fingerprint, file.text("fingerprint", kMostText));
  int64_t numbers[3] = {};
  LONGKV_TRY(file.read("session", numbers, sizeof(numbers)));
  info.context = numbers[0];
  const KvEntry* tokens = file.find("tokens");
  const uint64_t n = tokens != nullptr ? tokens->size : UINT64_MAX;
  if (n % sizeof(int32_t) != 0 || n / sizeof(int32_t) > kMostTokens || (n > 0 && n / 4096 > tokens->stored)) {
    return fail(Code::kCorrupt, "KV file '{}': the tokens are missing, or are no tokens", file.path());
  }
  info.ids.resize(size_t(n / sizeof(int32_t)));
  LONGKV_TRY(file.read("tokens", info.ids.data(), n));
  info.origin.exact = std::clamp<int64_t>(numbers[1], 0, int64_t(info.ids.size()));
  info.origin.one_prompt = numbers[2] == 1;
  return info;
}

Result<KvRestored> restore_session(Session& session, const std::shared_ptr<const KvFile>& file,
                                   const KvRestoreOptions& options) {
  if (session.options().keeper) {
    return fail(Code::kInvalidArgument, "a keep stage that no recipe names cannot be saved or restored");
  }
  LONGKV_ASSIGN(KvFileInfo info, read_kv_info(*file));
  const std::string difference = fingerprint_difference(info.fingerprint, session_fingerprint(session));
  if (!difference.empty()) {
    return fail(Code::kInvalidArgument, "KV file '{}' belongs to other settings: {}", file->path(), difference);
  }
  if (int64_t(info.ids.size()) > session.context()) {
    return fail(Code::kInvalidArgument, "KV file '{}' holds {} tokens, the context is {}; use -c {} or more",
                file->path(), info.ids.size(), session.context(), info.ids.size());
  }
  const ModelConfig& c = session.model().config();
  if (std::any_of(info.ids.begin(), info.ids.end(), [&](int32_t id) { return id < 0 || id >= c.vocab; })) {
    return fail(Code::kCorrupt, "KV file '{}': a token is outside of the vocabulary of {}", file->path(), c.vocab);
  }
  if (session.on_card()) return fail(Code::kUnsupported, "KV files go on without a card; leave -ngl out");
  LONGKV_ASSIGN(std::unique_ptr<KvSession> kv, session.make_kv(session.kv().recipe()));
  KvFileLoader loader(file, options.verify);
  std::vector<float> logits;
  loader.list("logits", logits, uint64_t(c.vocab));
  {
    const KvState::Level level(loader, "kv");
    if (loader.ok()) kv->visit(loader, options.rows_only);
  }
  LONGKV_TRY(loader.finish(session.pool(), options.pause));
  const bool finite = std::all_of(logits.begin(), logits.end(),
                                  [](float v) { return std::abs(v) <= std::numeric_limits<float>::max(); });
  if (kv->tokens().v != int64_t(info.ids.size()) || !finite ||
      logits.size() != (info.ids.empty() ? 0 : size_t(c.vocab))) {
    return fail(Code::kCorrupt, "KV file '{}': its {} tokens, {} cached ones and {} logits do not fit together",
                file->path(), info.ids.size(), kv->tokens().v, logits.size());
  }
  if (options.first_tokens >= 0) {
    const auto n = std::min(options.first_tokens, int64_t(info.ids.size()));
    LONGKV_TRY(kv->truncate(TokenCount{n}));
    if (options.rows_only) kv->index_rows();
    info.ids.resize(size_t(n));
    logits.clear();
    info.origin = {std::min(info.origin.exact, n), false, n <= info.origin.exact};
  }
  KvRestored restored{int64_t(info.ids.size()), loader.bytes_mapped(), loader.bytes_copied()};
  session.adopt(std::move(kv), std::move(info.ids), std::move(logits), info.origin);
  return restored;
}

Result<KvRestored> restore_session(Session& session, const std::string& path, const KvRestoreOptions& options) {
  LONGKV_ASSIGN(const std::shared_ptr<KvFile> file, KvFile::open(path));
  if (!file->base_id().none()) {
    return fail(Code::kInvalidArgument,
                "KV file '{}' is a part of a prefix cache and continues the file {}; it is "
                "restored by that cache",
                path, file->base_id().hex());
  }
  return restore_session(session, file, options);
}

}  // namespace longkv
