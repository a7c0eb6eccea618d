// A sequence whose weights are on the card and whose KV cache lies in memory under any recipe. Only for sources built
// with CUDA.
#pragma once

#include <memory>

#include "cuda/card_session.h"

namespace longkv {

Result<std::unique_ptr<DeviceRunner>> make_card_host_session(std::shared_ptr<CardModel> model,
                                                             const CardSessionOptions& options, ThreadPool& pool);

}  // namespace longkv
