// One sequence on a card. Needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>

#include "base/threads.h"
#include "cuda/card_model.h"
#include "engine/device_runner.h"
#include "kv/recipe.h"
#include "longkv/status.h"

namespace longkv {

class Graph;

struct CardSessionOptions {
  int64_t context = 0;
  int64_t chunk = 0;  // prompt tokens that pass a layer together; 0: as many as memory and speed suggest
  bool layer_major = true;
  Recipe recipe;
  KvSession* kv = nullptr;  // the cache in memory, under any recipe; nullptr: the card chooses and attends
  bool hybrid = false;      // ... over rows in memory, with the blocks that it attended lately on the card
  // Where the model has layers in memory: what computes them for a decoded token, and, unless `kv` holds all layers'
  // rows, a cache of those layers alone.
  Graph* graph = nullptr;
  std::shared_ptr<KvSession> host_kv;
  // The cache in memory of a recipe that drops or merges rows after prompts; the card decodes over what it keeps.
  KvSession* kept = nullptr;
};

// What of a recipe the card cannot do: kUnsupported that names it.
Status card_supports(const LoadedModel& model, const Recipe& recipe);
// The same with rows in memory and the blocks in use on the card.
Status card_supports_hybrid(const LoadedModel& model, const Recipe& recipe);
// The same with the cache in memory: decoding is the CPU's, so only how prompts are read matters.
Status card_supports_host_kv(const LoadedModel& model, const Recipe& recipe);

// Errors: kUnsupported, kOutOfMemory (names what did not fit).
Result<std::unique_ptr<DeviceRunner>> make_card_session(std::shared_ptr<CardModel> model,
                                                        const CardSessionOptions& options, ThreadPool& pool);

}  // namespace longkv
