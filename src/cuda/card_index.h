// Indexes of the layers that choose blocks, and the choice: what of a recipe's index and select stages the card has.
// Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/bits.h"
#include "cuda/mass.h"
#include "cuda/runtime.h"
#include "cuda/select.h"
#include "kv/recipe.h"
#include "model/config.h"

namespace longkv {

// What of a decoded token's choice follows from the number of tokens alone: a recorded step leaves the rest out.
struct CardChoiceStep {
  bool all = false;    // every row is attended: nothing is scored
  bool ends = true;    // a block ends with the token: its summary is written (one-bit keys are, at every token)
  bool sieves = true;  // so many blocks that the choice looks at tops first
  static constexpr int kKinds = 8;
  int kind() const { return int(all) | int(ends) << 1 | int(sieves) << 2; }
};

class CardIndex {
 public:
  // Whether the card has these stages.
  static bool supports(const IndexSpec& index, const SelectSpec& select, const ModelConfig& config);
  // Of layers from `first_layer` on.
  static Result<std::unique_ptr<CardIndex>> create(CardMemory& memory, const ModelConfig& config, const Recipe& recipe,
                                                   int64_t capacity, int first_layer);

  bool selects(int layer) const { return chooses_[size_t(layer)]; }
  const card::ChoiceRules& rules() const { return rules_; }
  int64_t block() const { return block_; }
  int64_t list_tiles() const { return list_.stride; }
  int64_t scan_bytes(int64_t tokens) const;     // that one layer's scan reads
  int64_t rows_attended(int64_t tokens) const;  // of a KV head by a token that sees so many

  // Rows [begin, end) of the layer are in kv.
  Status update(int layer, const card::CardKv& kv, int64_t begin, int64_t end, cudaStream_t stream) const;
  // Of a decoded token that sees so many, itself included.
  CardChoiceStep step_at(int64_t tokens) const;
  // Of a decoded token, whose row lies in `store` where that has data, else in kv: indexes the row, scores and chooses.
  // No list where step.all. A step that leaves nothing out does for every number of tokens.
  Result<card::TileList> choose(int layer, const CardChoiceStep& step, const card::half_t* query,
                                const card::CardKv& kv, const card::BlockStore& store, const int64_t* position,
                                cudaStream_t stream) const;
  int32_t* tiles() const { return tiles_.as<int32_t>(); }
  // Whether tokens of the chosen blocks are kept by their mass; then what the steps attended is counted on the card.
  bool by_mass() const { return p_ > 0; }
  const unsigned long long* counters() const { return mass_.counters; }

 private:
  explicit CardIndex(const ModelConfig& config) : config_(config) {}
  Status create_coarse(CardMemory& memory, const Recipe& recipe, int64_t capacity);
  int64_t most_candidates(int64_t tokens) const;
  Status index_last(int layer, const CardChoiceStep& step, const card::CardKv& kv, const card::BlockStore& store,
                    const int64_t* position, cudaStream_t stream) const;
  Status choose_candidates(int layer, const card::half_t* query, const card::CardKv& kv, const int64_t* position,
                           cudaStream_t stream) const;

  const ModelConfig& config_;
  bool by_bits_ = false;
  double p_ = 0;  // above 0: tokens are kept by mass
  card::MassScratch mass_;
  int block_ = 16;
  std::vector<bool> chooses_;                // [layers]
  std::vector<card::CardSummaries> boxes_;   // [layers]; also says blocks and capacity to the choice
  std::vector<card::CardBits> bits_;         // [layers]
  std::vector<card::CardSummaries> coarse_;  // [layers] of a two-level index; empty: one level
  card::CoarseLimits limits_;
  card::BitsScratch masses_;
  card::ChoiceRules rules_;
  card::TileList list_;
  CardBuffer memory_, scores_, mass_memory_, tiles_, coarse_memory_, coarse_lists_, token_memory_;
};

}  // namespace longkv
