// Rows of layers whose older rows are encoded on the card (kivi2, kivi4, channel masks): memory, the border, and what
// happens to it. Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/old_border.h"
#include "cuda/runtime.h"
#include "kv/recipe.h"
#include "kv/region_store.h"
#include "model/config.h"

namespace longkv {

class CardOldRows {
 public:
  // Of layers from `first_layer` on that have no window. Errors: kUnsupported (directions), kInvalidArgument (a mask of
  // another model).
  static Result<std::unique_ptr<CardOldRows>> create(CardMemory& memory, const ModelConfig& config,
                                                     const Recipe& recipe, int64_t capacity, int first_layer);
  // Where on the card the border lies for decoded tokens; end() is to be copied there before each.
  Status place_end(const int64_t* end);

  bool holds(int layer) const { return layers_[size_t(layer)].old.heads != nullptr; }
  const card::CardKv& rows(int layer) const { return layers_[size_t(layer)].rows; }
  const card::CardOld& old(int layer) const { return layers_[size_t(layer)].old; }
  bool masked() const { return masked_; }
  int64_t end() const { return border_.end(); }
  int64_t bytes(int64_t tokens) const;  // of all layers
  // Of the rows that one layer attends, of `attended` rows a KV head.
  int64_t attended_bytes(int layer, int64_t tokens, int64_t attended) const;

  // --- a prompt: rows [0, start) to work; then all of [0, rows) are in work
  Status read(int layer, int64_t start, const card::CardKv& work, cudaStream_t stream);
  Status take(int layer, int64_t rows, const card::CardKv& work, cudaStream_t stream);

  // --- decoded tokens
  Status encode_last(const int64_t* position, cudaStream_t stream) const;

  // After a prompt or a token: so many rows are held, in all layers.
  void count(int64_t rows) { border_.count(rows); }
  // Rows from `rows` on go, also those of a prompt that only some layers took.
  Status truncate(int64_t rows, cudaStream_t stream);
  // Where in place of old queries `to` is used: see gather_queries().
  Status gather(int layer, const card::half_t* q, int heads, float scale, card::half_t* to, float* shift,
                cudaStream_t stream) const {
    return card::gather_queries(q, heads, layers_[size_t(layer)].old, scale, to, shift, stream);
  }

 private:
  CardOldRows() = default;

  RegionSpec spec_;
  int kv_heads_ = 0, dim_ = 0;
  bool masked_ = false, means_ = false;
  card::OldBorder border_;
  std::vector<int> kept_;               // [layers][kv_heads]
  std::vector<card::OldLayer> layers_;  // [layers]
  int count_ = 0;                       // of those that hold rows
  CardBuffer memory_, heads_, list_, masks_;
};

}  // namespace longkv
