// Recipes that drop or merge rows when a prompt was read. Only for sources built with CUDA.
#pragma once

#include <memory>

#include "cuda/card_session.h"

namespace longkv {

// options.kept is the cache in memory, whose rows and biases the card decodes over. Errors: kUnsupported for recipes
// that evict while decoding (card_supports()) and where layers lie in memory, kOutOfMemory.
Result<std::unique_ptr<DeviceRunner>> make_card_kept_session(std::shared_ptr<CardModel> model,
                                                             const CardSessionOptions& options, ThreadPool& pool);

}  // namespace longkv
