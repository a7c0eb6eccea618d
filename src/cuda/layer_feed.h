// The matrices of layers that lie in memory, brought to a card one layer after another while a prompt is read. Only for
// sources built with CUDA.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/card_model.h"
#include "cuda/upload.h"

namespace longkv {

// One layer's matrices have room. They are copied by a thread and a stream of their own: as soon as a layer's were
// decoded for its products, the next layer's are on their way, and after the last layer the first one's again.
class LayerFeed {
 public:
  static Result<std::unique_ptr<LayerFeed>> create(std::shared_ptr<CardModel> model);
  ~LayerFeed();

  // The layer's matrices; `stream` goes on when they are there. end() must follow, when it has read them.
  Result<const CardLayerStacks*> begin(int layer, cudaStream_t stream);
  Status end(int layer, cudaStream_t stream);

 private:
  explicit LayerFeed(std::shared_ptr<CardModel> model) : model_(std::move(model)) {}
  Status prepare();
  void work();
  Status bring(int layer);

  std::shared_ptr<CardModel> model_;
  std::vector<CardLayerStacks> layers_;  // all in the same memory
  CardBuffer memory_;
  CardStream bus_;
  std::unique_ptr<WeightUpload> upload_;
  cudaEvent_t ready_ = nullptr, free_ = nullptr;

  std::mutex mutex_;
  std::condition_variable changed_;
  int wanted_ = -1;  // to be brought
  int held_ = -1;    // has been queued on the bus
  Status failed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace longkv
