// One decode step of several sequences of a model: weights are read once for all of them, attention is each one's own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/session.h"

namespace longkv {

class BatchDecoder {
 public:
  // For sessions made with the same model, context, products and pool.
  BatchDecoder(std::shared_ptr<const LoadedModel> model, int64_t context, ProductType products, ThreadPool& pool);

  // Feeds ids[i] to *sessions[i], all of them different; logits() of each then predicts its next token. Every session
  // ends as after Session::decode(ids[i]), bit for bit, whatever the others are. results[i]: as Session::decode();
  // a session that failed holds an unfinished token and must be cut.
  void decode(std::span<Session* const> sessions, std::span<const int32_t> ids, std::span<Status> results);

  // One token each of KV sides without a session (Session::make_kv), under recipes that do not look at what tokens are;
  // row i of logits [kvs][vocab] is what a session over kvs[i] would hold. kInternal where it is not finite.
  void decode(std::span<KvSession* const> kvs, std::span<const int32_t> ids, float* logits, std::span<Status> results);

 private:
  // At a time: more rows would not fit the first-level cache beside the weights.
  static constexpr size_t kRows = 8;
  void decode_group(std::span<Session* const> sessions, std::span<const int32_t> ids, std::span<Status> results);
  // kvs_ and positions_ through all layers; logits: [kvs][vocab].
  void decode_rows(std::span<const int32_t> ids, float* logits, std::span<Status> results);

  Graph graph_;
  std::vector<float> hidden_, logits_;
  std::vector<KvSession*> kvs_;
  std::vector<int64_t> positions_;
};

}  // namespace longkv
