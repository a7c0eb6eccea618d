#ifdef LONGKV_WITH_CUDA

#include "cuda/layer_feed.h"

#include <algorithm>
#include <system_error>

#include "base/cpu.h"
#include "base/error.h"
#include "cuda/card_model_impl.h"

namespace longkv {

namespace {
constexpr int kCopyThreads = 8;  // unpacking is slower than copying
}

Result<std::unique_ptr<LayerFeed>> LayerFeed::create(std::shared_ptr<CardModel> model) {
  std::unique_ptr<LayerFeed> feed(new LayerFeed(std::move(model)));
  LONGKV_TRY(feed->prepare());
  return feed;
}

Status LayerFeed::prepare() {
  CardModel::Impl& m = model_->impl();
  int64_t largest = 0;
  for (int i = 0; i < m.host_layers; ++i) {
    layers_.push_back(m.layers[size_t(i)]);
    largest = std::max(largest, layers_.back().bytes());
  }
  LONGKV_ASSIGN(memory_, CardBuffer::create(*m.memory, largest, "the matrices of a layer that lies in memory"));
  for (CardLayerStacks& l : layers_) {
    uint8_t* at = memory_.data();
    for (CardStack* s : l.all()) {
      s->place(at);
      at += s->bytes();
    }
  }
  LONGKV_ASSIGN(bus_, CardStream::create());
  LONGKV_ASSIGN(upload_, WeightUpload::create(*m.memory, bus_.get(), std::min(kCopyThreads, default_threads())));
  for (cudaEvent_t* e : {&ready_, &free_})
    LONGKV_TRY(cuda_status(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "creating an event"));
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error&) {
    return fail(Code::kOutOfMemory, "the system starts no thread to copy weights");
  }
  return {};
}

LayerFeed::~LayerFeed() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  if (bus_.get() != nullptr) (void)cudaStreamSynchronize(bus_.get());
  for (cudaEvent_t e : {ready_, free_}) {
    if (e != nullptr) (void)cudaEventDestroy(e);
  }
}

void LayerFeed::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || wanted_ >= 0; });
    if (stop_) return;
    const int layer = wanted_;
    lock.unlock();
    const Status done = bring(layer);
    lock.lock();
    wanted_ = -1;
    held_ = done.ok() ? layer : -1;
    failed_ = done;
    changed_.notify_all();
  }
}

Status LayerFeed::bring(int layer) {
  CardModel::Impl& m = model_->impl();
  LONGKV_TRY(cuda_status(cudaSetDevice(m.card.index), "choosing the card"));
  LONGKV_TRY(cuda_status(cudaStreamWaitEvent(bus_.get(), free_), "copying weights"));
  CardLayerStacks& l = layers_[size_t(layer)];
  for (const CardStack* s : l.all()) LONGKV_TRY(upload_->stack(*s));
  m.streamed_bytes += l.file_bytes();
  return cuda_status(cudaEventRecord(ready_, bus_.get()), "copying weights");
}

Result<const CardLayerStacks*> LayerFeed::begin(int layer, cudaStream_t stream) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return wanted_ < 0 || wanted_ == layer; });
  if (held_ != layer && wanted_ != layer) {
    wanted_ = layer;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return wanted_ < 0; });
  LONGKV_TRY(failed_);
  LONGKV_TRY(cuda_status(cudaStreamWaitEvent(stream, ready_), "copying weights"));
  return &layers_[size_t(layer)];
}

Status LayerFeed::end(int layer, cudaStream_t stream) {
  LONGKV_TRY(cuda_status(cudaEventRecord(free_, stream), "copying weights"));
  const int next = (layer + 1) % int(layers_.size());
  const std::lock_guard lock(mutex_);
  if (next == layer) return {};
  held_ = -1;
  wanted_ = next;
  changed_.notify_all();
  return {};
}

}  // namespace longkv

#endif
