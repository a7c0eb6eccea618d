// The inside of CardModel. Only for sources that are built with CUDA.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/card_model.h"
#include "cuda/gemm.h"
#include "cuda/kv.h"
#include "cuda/matrix.h"
#include "cuda/runtime.h"
#include "cuda/stack.h"

namespace longkv {

// Of a layer that lies in memory the stacks are not placed (LayerFeed has copies that are).
struct CardLayer : CardLayerStacks {
  // Vectors; nullptr: the model has none.
  const float *attn_norm = nullptr, *qkv_bias = nullptr, *q_norm = nullptr, *k_norm = nullptr, *o_bias = nullptr,
              *post_attn_norm = nullptr, *ffn_norm = nullptr, *post_ffn_norm = nullptr;
  int64_t window = 0;
  bool window_rope = false;
};

struct CardModel::Impl {
  std::shared_ptr<const LoadedModel> model;
  CudaCard card;
  std::unique_ptr<CardMemory> memory;
  CardStream stream;  // of the loading
  std::vector<CardBuffer> buffers;
  std::vector<CardLayer> layers;
  CardStack output;
  const float* output_norm = nullptr;
  int host_layers = 0;
  std::atomic<int64_t> streamed_bytes = 0;
  std::mutex pin_mutex;
  std::unique_ptr<PinnedPages> pins;  // of the layers in memory, once a sequence reads them (LayerFeed)
};

}  // namespace longkv
