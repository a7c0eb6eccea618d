// What a stored KV state depends on beside its tokens, as text: one setting a line, so that a mismatch can be named.
#pragma once

#include <string>

#include "engine/session.h"

namespace longkv {

// Lines "name: value": model and a hash of its metadata, tensor directory and sampled weights, tokenizer, RoPE as it is
// used for the session's context, attention, shape, the recipe with a hash of the files that it names, products. Reads
// a few pages of each tensor the first time; the result for a model is kept.
std::string session_fingerprint(const Session& session);

// Empty when equal; else what differs, as "the file has ..., this run has ...".
std::string fingerprint_difference(const std::string& file, const std::string& run);

}  // namespace longkv
