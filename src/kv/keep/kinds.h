// The keepers that make_keeper chooses from.
#pragma once

#include <memory>

#include "kv/keep/keep.h"

namespace longkv {

std::unique_ptr<Keeper> make_streaming(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_knorm(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_keydiff(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_random(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_snapkv(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_pyramidkv(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_tova(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_h2o(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_expected_attention(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_adakv(const KeepSpec& spec, const KvShape& shape);
// Errors: kIo, kInvalidArgument (a file of gates that does not fit the model).
Result<std::unique_ptr<Keeper>> make_duo(const KeepSpec& spec, const KvShape& shape, const std::string& model);
std::unique_ptr<Keeper> make_kvzip(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_fastgen(const KeepSpec& spec, const KvShape& shape);
std::unique_ptr<Keeper> make_asymkv(const KeepSpec& spec, const KvShape& shape);
// normmass and kvslimmer.
std::unique_ptr<Keeper> make_merging(const KeepSpec& spec, const KvShape& shape);

}  // namespace longkv
