// KV files around a run: what was read before is taken from a file, and what was read is saved.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <span>
#include <string>

#include "engine/session.h"
#include "longkv/status.h"

namespace longkv::cli {

struct KvStateOptions {
  std::string save;     // after the prompt
  std::string restore;  // before it
  std::string cache;    // both, and the file need not exist
  bool compress = false;
  bool no_verify = false;
};

void add_kv_state_options(CLI::App& command, KvStateOptions& options);
// Contradictions, and targets that cannot be written: before a long prompt is read.
Status check_kv_state(const KvStateOptions& options);

// Puts the file's state in the session, cut to the tokens that `ids` begins with: all of them, whose logits are there
// too, or at least one token short of it. The number of tokens is returned that need not be read. A --prompt-cache file
// gives what has the bits of reading the prompt at once, and a notice where that is nothing; --kv-restore gives all
// that can be taken over, with a notice where it was decided by another prompt's end. Errors: those of restore_session,
// and kInvalidArgument when the file of --kv-restore shares no usable beginning with the prompt.
Result<int64_t> restore_kv(const KvStateOptions& options, Session& session, std::span<const int32_t> ids);
// A --prompt-cache file that cannot be written is a notice.
Status save_kv(const KvStateOptions& options, Session& session);

}  // namespace longkv::cli
