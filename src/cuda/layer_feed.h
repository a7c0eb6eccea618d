// The matrices of layers that lie in memory, brought to a card one layer after another while a prompt is read. Only for
// sources built with CUDA.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/threads.h"
#include "cuda/card_model.h"
#include "cuda/runtime.h"
#include "cuda/stack.h"

namespace longkv {

// One layer's matrices have room, and so have the bytes of one more as they lie in memory: in the file, or in the
// packed form that the CPU decodes from. These bytes are copied by a thread and a stream of its own, straight from
// where they lie where the system pins them, else through two pinned pieces in turn; the card arranges them. As soon as
// a layer's bytes were arranged, the next layer's are on their way, and after the last layer the first one's again.
class LayerFeed {
 public:
  static Result<std::unique_ptr<LayerFeed>> create(std::shared_ptr<CardModel> model);
  ~LayerFeed();

  // The layer's matrices, for what is queued on `stream` until the next call.
  Result<const CardLayerStacks*> begin(int layer, cudaStream_t stream);

 private:
  // One matrix in memory: `rows` of `part` from `first` on, and where its bytes come to.
  struct Source {
    const Weight* weight;
    const CardMatrix* part;
    int64_t first;
    const uint8_t* data;
    int64_t bytes, at;
  };
  explicit LayerFeed(std::shared_ptr<CardModel> model);
  Status prepare();
  void list_sources();
  Status pin();
  void work();
  Status bring(int layer);
  Status through_pieces(const Source& s);
  Status arrange(int layer, cudaStream_t stream);

  std::shared_ptr<CardModel> model_;
  std::vector<CardLayerStacks> layers_;       // all in the same memory
  std::vector<std::vector<Source>> sources_;  // of each layer
  CardBuffer memory_, raw_;
  CardStream bus_;
  ThreadPool pool_;  // that fills pieces
  PinnedBuffer pieces_[2];
  cudaEvent_t ready_ = nullptr, free_ = nullptr, piece_done_[2] = {};
  int next_piece_ = 0;
  int arranged_ = -1;  // layer whose matrices are in memory_

  std::mutex mutex_;
  std::condition_variable changed_;
  int wanted_ = -1;  // to be brought
  int held_ = -1;    // has been queued on the bus
  Status failed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace longkv
