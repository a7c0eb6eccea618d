#ifdef LONGKV_WITH_CUDA

#include "cuda/layer_feed.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/log.h"
#include "cuda/card_model_impl.h"
#include "cuda/ops.h"
#include "ops/packed_rows.h"

namespace longkv {

namespace {
constexpr int64_t kPiece = int64_t(16) << 20, kTask = int64_t(1) << 20;  // bytes
}

LayerFeed::LayerFeed(std::shared_ptr<CardModel> model) : model_(std::move(model)), pool_(default_threads()) {}

Result<std::unique_ptr<LayerFeed>> LayerFeed::create(std::shared_ptr<CardModel> model) {
  std::unique_ptr<LayerFeed> feed(new LayerFeed(std::move(model)));
  LONGKV_TRY(feed->prepare());
  return feed;
}

// After the layers were placed: sources point to their parts.
void LayerFeed::list_sources() {
  for (CardLayerStacks& l : layers_) {
    std::vector<Source> list;
    int64_t at = 0;
    for (CardStack* s : l.all()) {
      auto weight = s->sources.begin();
      for (const CardMatrix& part : s->parts) {
        for (int64_t first = 0; first < part.rows; first += (*weight++)->rows) {
          const Weight& w = **weight;
          const bool packed = w.packed != nullptr;
          list.push_back(
              {&w, &part, first, packed ? w.packed : w.data, packed ? packed_bytes(w) : w.rows * w.row_bytes, at});
          at = round_up(at + list.back().bytes, 256);
        }
      }
    }
    sources_.push_back(std::move(list));
  }
}

// The bytes of the layers in memory, once for all sequences.
Status LayerFeed::pin() {
  CardModel::Impl& m = model_->impl();
  const std::lock_guard lock(m.pin_mutex);
  if (m.pins == nullptr) {
    m.pins = std::make_unique<PinnedPages>();
    std::vector<std::pair<const uint8_t*, int64_t>> ranges;
    for (const auto& list : sources_)
      for (const Source& s : list) ranges.emplace_back(s.data, s.bytes);
    m.pins->add(std::move(ranges));
    log_verbose("{} MiB of weights in memory are pinned for copies to the card", m.pins->bytes() >> 20);
  }
  const bool all = std::all_of(sources_.begin(), sources_.end(), [&](const auto& list) {
    return std::all_of(list.begin(), list.end(), [&](const Source& s) { return m.pins->holds(s.data, s.bytes); });
  });
  if (all) return {};
  for (int i = 0; i < 2; ++i) {
    LONGKV_ASSIGN(pieces_[i], PinnedBuffer::create(kPiece, "staging of weights"));
    LONGKV_TRY(cuda_status(cudaEventCreateWithFlags(&piece_done_[i], cudaEventDisableTiming), "creating an event"));
  }
  return {};
}

Status LayerFeed::prepare() {
  CardModel::Impl& m = model_->impl();
  int64_t largest = 0, largest_raw = 0;
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
  list_sources();
  for (const auto& list : sources_) largest_raw = std::max(largest_raw, list.back().at + list.back().bytes);
  LONGKV_ASSIGN(raw_, CardBuffer::create(*m.memory, largest_raw, "the bytes of a layer that lies in memory"));
  LONGKV_ASSIGN(bus_, CardStream::create());
  LONGKV_TRY(pin());
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
  for (cudaEvent_t e : {ready_, free_, piece_done_[0], piece_done_[1]}) {
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
  for (const Source& s : sources_[size_t(layer)]) {
    if (!m.pins->holds(s.data, s.bytes)) {
      LONGKV_TRY(through_pieces(s));
      continue;
    }
    LONGKV_TRY(
        cuda_status(cudaMemcpyAsync(raw_.data() + s.at, s.data, size_t(s.bytes), cudaMemcpyHostToDevice, bus_.get()),
                    "copying weights"));
  }
  m.streamed_bytes += layers_[size_t(layer)].file_bytes();
  return cuda_status(cudaEventRecord(ready_, bus_.get()), "copying weights");
}

Status LayerFeed::through_pieces(const Source& s) {
  for (int64_t done = 0; done < s.bytes; done += kPiece) {
    const int64_t n = std::min(kPiece, s.bytes - done);
    const int i = next_piece_;
    next_piece_ = 1 - next_piece_;
    LONGKV_TRY(cuda_status(cudaEventSynchronize(piece_done_[i]), "copying weights"));
    auto* piece = pieces_[i].as<uint8_t>();
    pool_.run(ceil_div(n, kTask), [&](int64_t task, int) {
      const int64_t at = task * kTask;
      std::memcpy(piece + at, s.data + done + at, size_t(std::min(kTask, n - at)));
    });
    LONGKV_TRY(
        cuda_status(cudaMemcpyAsync(raw_.data() + s.at + done, piece, size_t(n), cudaMemcpyHostToDevice, bus_.get()),
                    "copying weights"));
    LONGKV_TRY(cuda_status(cudaEventRecord(piece_done_[i], bus_.get()), "copying weights"));
  }
  return {};
}

Status LayerFeed::arrange(int layer, cudaStream_t stream) {
  for (const Source& s : sources_[size_t(layer)]) {
    const Weight& w = *s.weight;
    const uint8_t* from = raw_.data() + s.at;
    LONGKV_TRY(w.packed != nullptr ? card::pack_eights(*s.part, from, w.row_bytes, s.first, w.rows, stream)
                                   : card::pack_rows(*s.part, from, w.row_bytes, s.first, w.rows, stream));
  }
  return cuda_status(cudaEventRecord(free_, stream), "copying weights");
}

Result<const CardLayerStacks*> LayerFeed::begin(int layer, cudaStream_t stream) {
  if (arranged_ == layer) return &layers_[size_t(layer)];
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return wanted_ < 0 || wanted_ == layer; });
  if (held_ != layer && wanted_ != layer) {
    wanted_ = layer;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return wanted_ < 0; });
  LONGKV_TRY(failed_);
  LONGKV_TRY(cuda_status(cudaStreamWaitEvent(stream, ready_), "copying weights"));
  arranged_ = -1;
  LONGKV_TRY(arrange(layer, stream));
  arranged_ = layer;
  held_ = -1;
  const int next = (layer + 1) % int(layers_.size());
  if (next == layer) return &layers_[size_t(layer)];
  wanted_ = next;
  changed_.notify_all();
  return &layers_[size_t(layer)];
}

}  // namespace longkv

#endif
