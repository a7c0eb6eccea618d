// A model's weights on a card. Immutable once loaded, shared by sessions. Needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/threads.h"
#include "cuda/cards.h"
#include "longkv/status.h"
#include "model/model.h"

namespace longkv {

struct CardOptions {
  int device = 0;        // as CUDA counts
  int64_t vram_cap = 0;  // bytes that weights, caches and scratch may take together; 0: what the card has free
  // The matrices of the first so many layers stay in memory: the card takes them once for a prompt (or a span of a long
  // one), and the CPU computes these layers of a decoded token.
  int host_layers = 0;
};

class CardModel {
 public:
  // Errors: kUnsupported (no card, a shape or type that the card's kernels do not have: names it), kOutOfMemory (names
  // the tensor).
  static Result<std::shared_ptr<CardModel>> load(std::shared_ptr<const LoadedModel> model, const CardOptions& options);
  ~CardModel();

  const LoadedModel& model() const;
  const CudaCard& device() const;
  int host_layers() const;
  int64_t streamed_bytes() const;  // of their matrices, over the bus so far
  int64_t vram_used() const;       // bytes, of everything that shares this model
  int64_t vram_peak() const;
  int64_t vram_cap() const;
  double bandwidth() const;  // bytes/s by the card's clock and bus; 0 = unknown

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  CardModel();
  std::unique_ptr<Impl> impl_;
};

}  // namespace longkv
