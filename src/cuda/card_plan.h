// How a model is divided between a card and memory, before anything is allocated. Needs neither a card nor CUDA.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "kv/recipe.h"
#include "longkv/status.h"
#include "model/model.h"

namespace longkv {

inline constexpr int64_t kCardGemmWorkspace = int64_t(32) << 20;  // bytes
// Pieces of rows that a token's attention is cut into: enough blocks for two on every multiprocessor.
int card_splits(int multiprocessors, int kv_heads);
inline constexpr int kCardRawSplits = 8;  // ... and, beside encoded rows, those that are not
// Bytes of a sequence's buffers: whatever the chunk (rounded up somewhat), and for chunks of so many tokens.
int64_t card_graph_bytes(const ModelConfig& c, int multiprocessors, int64_t context);
int64_t card_chunk_bytes(const ModelConfig& c, int64_t chunk);
// Of one layer's rows under a recipe that encodes old ones; kept: channels of each of its KV heads, empty: all.
int64_t card_old_bytes(const ModelConfig& c, const Recipe& recipe, int64_t context, std::span<const int> kept);
// Of the matrices of one layer that are brought to the card for a prompt, with what copying takes.
int64_t card_feed_bytes(int64_t largest_layer);

enum class CardRows {
  kOnCard,    // of the card's layers; the other layers' rows lie in memory
  kHybrid,    // in memory, with the blocks in use on the card
  kInMemory,  // all in memory
};

struct CardPlanRequest {
  Recipe recipe;
  int64_t context = 0;
  int64_t chunk = 0;  // 0: as memory and speed suggest
  CardRows rows = CardRows::kOnCard;
  int64_t budget = 0;         // bytes of VRAM
  int multiprocessors = 128;  // of the card; buffers of a decoded token depend on it a little
  int layers = -1;            // on the card; -1: as many as fit
};

struct CardPlan {
  int layers = 0;
  int on_card = 0;  // the last ones; the output matrix too
  int64_t budget = 0;
  // Bytes of VRAM.
  int64_t weight_bytes = 0;
  int64_t row_bytes = 0;  // KV rows and their index
  int64_t scratch_bytes = 0;
  // Of the other layers.
  int64_t memory_bytes = 0;  // weights: read from memory by every decoded token, over the bus once a span of a prompt
  int64_t span = 0;          // tokens of a prompt that go through all layers together, at least

  int in_memory() const { return layers - on_card; }
  int64_t total() const { return weight_bytes + row_bytes + scratch_bytes; }
  bool fits() const { return total() <= budget; }
};

// With layers -1 the most that fit; if not even none does, that plan, which does not fit. Errors: kUnsupported (a
// matrix that the card does not take).
Result<CardPlan> plan_card(const LoadedModel& model, const CardPlanRequest& request);

std::string card_plan_text(const CardPlan& plan);
nlohmann::ordered_json card_plan_json(const CardPlan& plan);

}  // namespace longkv
