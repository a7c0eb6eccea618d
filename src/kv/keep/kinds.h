// The keepers that make_keeper chooses from.
#pragma once

#include <memory>

#include "kv/keep/keep.h"

namespace longkv {

std::unique_ptr<Keeper> make_streaming(const KeepSpec& spec, const KvShape& shape);

}  // namespace longkv
