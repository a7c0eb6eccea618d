// Matrices that share an input, stacked: what a layer's products read on a card. Needs no CUDA header.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/matrix.h"
#include "model/weights.h"

namespace longkv {

struct CardStack {
  std::vector<CardMatrix> parts;  // neighbours of one type are one matrix
  std::vector<const Weight*> sources;
  int64_t rows = 0;
  int64_t cols = 0;

  // Without memory. Errors: kUnsupported for rows that the card's products do not take; `name` stands in it.
  static Result<CardStack> of(std::vector<const Weight*> weights, const std::string& name);
  int64_t bytes() const;  // on the card
  int64_t file_bytes() const;
  void place(uint8_t* memory);
};

// The four stacks of a layer.
struct CardLayerStacks {
  CardStack qkv, o, gate_up, down;

  static Result<CardLayerStacks> of(const LayerWeights& weights, int layer);
  std::vector<CardStack*> all() { return {&qkv, &o, &gate_up, &down}; }
  int64_t bytes() const { return qkv.bytes() + o.bytes() + gate_up.bytes() + down.bytes(); }
  int64_t file_bytes() const { return qkv.file_bytes() + o.file_bytes() + gate_up.file_bytes() + down.file_bytes(); }
};

}  // namespace longkv
