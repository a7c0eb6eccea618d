// Saving a session to a KV file and restoring it.
#pragma once

#include <memory>
#include <string>

#include "base/portions.h"
#include "engine/session.h"
#include "kv/file/reader.h"
#include "kv/file/writer.h"

namespace longkv {

// Writes everything that later tokens depend on. Errors: kInternal (a session in the middle of a prompt),
// kInvalidArgument (rows that belong to no tokens, a keep stage that is no recipe's), those of the writer's sink.
Status write_session(Session& session, KvFileWriter& writer);

// Saves to `path`, which appears, or is replaced, only once it is complete and flushed to the device. The number of
// bytes is returned. Errors: also kIo, with the old file untouched.
// `pause` is called between pieces of it.
Result<uint64_t> save_session(Session& session, const std::string& path, bool compress = false,
                              const Pause& pause = {});

struct KvRestoreOptions {
  // Check the sums of mapped rows before anything is computed with them, which reads the whole file once.
  bool verify = true;
  // Of a recipe whose state can be cut (kv/prefix/reuse.h): take the first n tokens, as the beginning of a prompt of
  // which the rest is read next. -1: the state as it is.
  int64_t first_tokens = -1;
  // ... and make its index of rows, instead of taking it over.
  bool rows_only = false;
  // Called between pieces of the check, which the calling thread does alone then.
  Pause pause = {};
};

struct KvRestored {
  int64_t tokens = 0;
  uint64_t bytes_mapped = 0;
  uint64_t bytes_copied = 0;
};

// Replaces the session's state by that of a file. It is built aside, checked, and only then exchanged: an error leaves
// the session as it was. Errors: kInvalidArgument (another model, recipe or setting; a context that is too small; says
// which), kCorrupt (damage, says where), kIo, kOutOfMemory.
Result<KvRestored> restore_session(Session& session, const std::shared_ptr<const KvFile>& file,
                                   const KvRestoreOptions& options = {});
Result<KvRestored> restore_session(Session& session, const std::string& path, const KvRestoreOptions& options = {});

// What a file says of itself, without its rows.
struct KvFileInfo {
  std::string fingerprint;
  int64_t context = 0;  // of the session that was saved
  Session::Origin origin;
  std::vector<int32_t> ids;
};
Result<KvFileInfo> read_kv_info(const KvFile& file);

}  // namespace longkv
