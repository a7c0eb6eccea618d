#include "cuda/stack.h"

#include <utility>

#include "base/error.h"

namespace longkv {

Result<CardStack> CardStack::of(std::vector<const Weight*> weights, const std::string& name) {
  CardStack s;
  s.cols = weights.front()->cols;
  for (const Weight* w : weights) {
    if (w->cols % 32 != 0) {
      return fail(Code::kUnsupported, "{} has rows of {} values; the card's products need a multiple of 32", name,
                  w->cols);
    }
    if (s.parts.empty() || s.parts.back().type != w->type) s.parts.push_back(CardMatrix{w->type, 0, w->cols});
    s.parts.back().rows += w->rows;
    s.rows += w->rows;
  }
  s.sources = std::move(weights);
  return s;
}

int64_t CardStack::bytes() const {
  int64_t all = 0;
  for (const CardMatrix& m : parts) all += card_matrix_bytes(m.type, m.rows, m.cols);
  return all;
}

int64_t CardStack::file_bytes() const {
  int64_t all = 0;
  for (const Weight* w : sources) all += w->rows * w->row_bytes;
  return all;
}

void CardStack::place(uint8_t* memory) {
  for (CardMatrix& m : parts) {
    place_planes(m, memory);
    memory += card_matrix_bytes(m.type, m.rows, m.cols);
  }
}

Result<CardLayerStacks> CardLayerStacks::of(const LayerWeights& l, int layer) {
  CardLayerStacks s;
  const std::string name = fmt::format("layer {}", layer);
  LONGKV_ASSIGN(s.qkv, CardStack::of({&l.q, &l.k, &l.v}, name + ", q k v"));
  LONGKV_ASSIGN(s.o, CardStack::of({&l.o}, name + ", attention output"));
  LONGKV_ASSIGN(s.gate_up, CardStack::of({&l.gate, &l.up}, name + ", gate and up"));
  LONGKV_ASSIGN(s.down, CardStack::of({&l.down}, name + ", down"));
  return s;
}

}  // namespace longkv
