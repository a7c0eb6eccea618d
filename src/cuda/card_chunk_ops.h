// The heavy operators of learning on a card (grad/chunk_ops.h). Needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>

#include "base/threads.h"
#include "cuda/card_model.h"
#include "grad/chunk_ops.h"
#include "longkv/status.h"

namespace longkv {

// Products with the card's weights take activations as pairs of halves, and sums are fp32; weights are what the card
// decodes them to, halves. Attention is fp32. The same input gives the same bits. Matrices of layers in memory are
// multiplied by the CPU. Rows of a prompt with an id stay on the card, as many as fit, until forget().
// Errors: kUnsupported, kOutOfMemory; of its operators also kUnsupported for caches whose heads hold different rows or
// merged ones.
Result<std::unique_ptr<ChunkOps>> make_card_chunk_ops(std::shared_ptr<CardModel> card, ThreadPool& pool);

// Bytes of VRAM that they take for chunks of so many tokens behind `context`, with one layer's rows.
int64_t card_learn_bytes(const ModelConfig& config, int64_t context, int64_t tokens);

}  // namespace longkv
