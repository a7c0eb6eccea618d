// The inside of CardModel. Only for sources that are built with CUDA.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "cuda/card_model.h"
#include "cuda/gemm.h"
#include "cuda/kv.h"
#include "cuda/matrix.h"
#include "cuda/runtime.h"

namespace longkv {

// Matrices that share an input, stacked: one where their types agree.
struct CardStack {
  std::vector<CardMatrix> parts;
  int64_t rows = 0;
  int64_t cols = 0;
};

struct CardLayer {
  CardStack qkv, o, gate_up, down;
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
};

}  // namespace longkv
