#ifdef LONGKV_WITH_CUDA

#include "cuda/card_runner.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "model/graph.h"

namespace longkv {

namespace {
constexpr int64_t kLargestChunk = 4096;
constexpr int64_t kHiddenBytes = int64_t(4) << 30;  // of the states of a prompt's span
constexpr int64_t kHostTokens = 32;                 // a prompt so short is computed faster than weights cross the bus
}  // namespace

CardRunner::~CardRunner() {
  for (cudaEvent_t e : done_) {
    if (e != nullptr) (void)cudaEventDestroy(e);
  }
}

Status CardRunner::open() {
  LONGKV_TRY(cuda_status(cudaSetDevice(model_->device().index), "choosing the card"));
  LONGKV_ASSIGN(stream_, CardStream::create());
  for (cudaEvent_t& e : done_)
    LONGKV_TRY(cuda_status(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "creating an event"));
  return {};
}

Status CardRunner::allocate_scratch(int64_t reserve) {
  const ModelConfig& c = config();
  size_t free = 0, total = 0;
  LONGKV_TRY(cuda_status(cudaMemGetInfo(&free, &total), "asking for free memory"));
  int64_t left = int64_t(free);
  if (memory().cap() > 0) left = std::min(left, memory().cap() - memory().used());
  left = std::max<int64_t>(0, left - reserve - CardGraph::fixed_bytes(*model_, options_.context));
  chunk_ = options_.chunk > 0 ? options_.chunk
                              : std::max(kLargestChunk, reads_sparsely() ? options_.recipe.prefill.chunk : 0);
  chunk_ = std::min({chunk_, round_up(options_.context, 64), int64_t(32768)});
  // Weights that come over the bus do so once a span, so nothing is kept back for another sequence.
  const int64_t share = left / (host_layers() > 0 ? 2 : 4);
  while (options_.chunk == 0 && chunk_ > 64 && CardGraph::chunk_bytes(c, chunk_) + sparse_bytes(chunk_) > share)
    chunk_ /= 2;
  LONGKV_ASSIGN(graph_, CardGraph::create(model_, options_.context, chunk_));
  if (reads_sparsely()) LONGKV_TRY(graph_->read_sparsely(options_.recipe.prefill, options_.context, chunk_));
  span_ = chunk_;
  if (options_.layer_major) {
    const int64_t fits = std::min(kHiddenBytes, share) / (c.dim * 4) / chunk_ * chunk_;
    span_ = std::clamp(fits, chunk_, round_up(options_.context, chunk_));
  }
  LONGKV_ASSIGN(hidden_, CardBuffer::create(memory(), span_ * c.dim * 4, "hidden states of a prompt"));
  LONGKV_ASSIGN(staging_, PinnedBuffer::create(chunk_ * c.dim * 4, "embeddings of a prompt's chunk"));
  LONGKV_ASSIGN(host_memory_, PinnedBuffer::create((c.dim + c.vocab) * 4 + 32, "a token's embedding and logits"));
  host_.position = host_memory_.as<int64_t>();
  host_.hidden = host_memory_.as<float>() + 8;
  host_.logits = host_.hidden + c.dim;
  return {};
}

void CardRunner::embed(std::span<const int32_t> ids, float* out) {
  const ModelConfig& c = config();
  const Weight& e = model_->model().weights().embedding;
  constexpr int64_t kTokensPerTask = 16;
  const auto n = int64_t(ids.size());
  pool_.run(ceil_div(n, kTokensPerTask), [&](int64_t task, int) {
    const int64_t end = std::min(n, (task + 1) * kTokensPerTask);
    for (int64_t t = task * kTokensPerTask; t < end; ++t) {
      float* row = out + t * c.dim;
      dequantize(e.type, e.row(ids[size_t(t)]), row, c.dim);
      if (c.embedding_scale != 1.0f) {
        for (int64_t i = 0; i < c.dim; ++i) row[i] *= c.embedding_scale;
      }
    }
  });
}

Status CardRunner::decode_host_layers(float* hidden, int64_t position) {
  for (int layer = 0; layer < host_layers(); ++layer)
    LONGKV_TRY(options_.graph->decode_layer(layer, *host_kv_, hidden, position));
  return {};
}

// The layers in memory of n embedded tokens in staging_, on the CPU.
Status CardRunner::host_span(int64_t n, int64_t start, int64_t end, const std::atomic<bool>* cancel) {
  for (int layer = 0; layer < host_layers(); ++layer) {
    LONGKV_TRY(options_.graph->prefill_layer(layer, *host_kv_, staging_.as<float>(), n, start, end, cancel));
    if (start + n == end) LONGKV_TRY(host_kv_->finish_prefill(layer));
  }
  return {};
}

// Logits of rows [at, at + n) of hidden_, which are tokens [first, first + n) of the prompt.
Status CardRunner::deliver(int64_t first, int64_t n, int64_t at, const LogitsSink& sink) {
  const ModelConfig& c = config();
  constexpr int64_t kRows = 64;
  std::vector<float> rows(size_t(std::min(kRows, n) * c.vocab));
  for (int64_t t = 0; t < n; t += kRows) {
    const int64_t count = std::min(kRows, n - t);
    for (int64_t i = 0; i < count; ++i) {
      LONGKV_TRY(graph_->output(hidden_.as<float>() + (at + t + i) * c.dim, stream_.get()));
      LONGKV_TRY(cuda_status(cudaMemcpyAsync(rows.data() + i * c.vocab, graph_->logits(), size_t(c.vocab) * 4,
                                             cudaMemcpyDeviceToHost, stream_.get()),
                             "logits"));
    }
    LONGKV_TRY(stream_.wait("logits of a prompt"));
    sink(first + t, count, rows.data());
  }
  return {};
}

// Reads ids through all layers. On return their hidden states lie in hidden_ and the work is done.
Status CardRunner::span(std::span<const int32_t> ids, int64_t start, int64_t done, int64_t total, int64_t end,
                        const PrefillProgress& progress, const std::atomic<bool>* cancel) {
  const ModelConfig& c = config();
  const auto n = int64_t(ids.size());
  cudaStream_t stream = stream_.get();
  float* hidden = hidden_.as<float>();
  const bool few = n <= std::min(kHostTokens, chunk_) && options_.graph != nullptr;
  const int first_layer = few ? host_layers() : 0;
  int64_t token_layers = n * first_layer, pieces = 0;
  if (first_layer > 0) {
    LONGKV_TRY(stream_.wait("reading a prompt"));
    embed(ids, staging_.as<float>());
    LONGKV_TRY(host_span(n, start, end, cancel));
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(hidden, staging_.as<float>(), size_t(n * c.dim) * 4, cudaMemcpyHostToDevice, stream),
        "hidden states"));
  }
  for (int layer = first_layer; layer < c.layers; ++layer) {
    LONGKV_TRY(graph_->load_layer(layer, stream));
    LONGKV_TRY(begin_layer(layer, start));
    for (int64_t begin = 0; begin < n; begin += chunk_) {
      const int64_t count = std::min(chunk_, n - begin);
      if (layer == 0) {
        LONGKV_TRY(stream_.wait("reading a prompt"));  // the staging buffer is free again
        embed(ids.subspan(size_t(begin), size_t(count)), staging_.as<float>());
        LONGKV_TRY(cuda_status(cudaMemcpyAsync(hidden + begin * c.dim, staging_.as<float>(), size_t(count * c.dim) * 4,
                                               cudaMemcpyHostToDevice, stream),
                               "embeddings"));
      }
      LONGKV_TRY(graph_->begin_chunk(start + begin, count, stream));
      LONGKV_TRY(chunk_layer(layer, hidden + begin * c.dim, start + begin, count, end));
      // The host stays two pieces ahead of the card at most, so that progress is true and an interrupt is soon met.
      cudaEvent_t event = done_[pieces++ % 2];
      LONGKV_TRY(cuda_status(cudaEventSynchronize(done_[pieces % 2]), "reading a prompt"));
      LONGKV_TRY(cuda_status(cudaEventRecord(event, stream), "reading a prompt"));
      if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) {
        LONGKV_TRY(stream_.wait("reading a prompt"));
        return fail(Code::kCancelled, "interrupted while the prompt was read");
      }
      token_layers += count;
      if (progress) progress(done + token_layers / c.layers, total);
    }
    LONGKV_TRY(end_layer(layer, start, n, start + n == end));
  }
  return stream_.wait("reading a prompt");
}

Status CardRunner::prefill(std::span<const int32_t> ids, const PrefillProgress& progress,
                           const std::atomic<bool>* cancel, const LogitsSink& sink, int64_t sink_from,
                           std::span<float> logits) {
  const int64_t held = tokens();
  const Status s = read(ids, progress, cancel, sink, sink_from, logits);
  if (s.ok()) return commit(int64_t(ids.size()));
  LONGKV_TRY(abandon(held));
  return s;
}

Status CardRunner::read(std::span<const int32_t> ids, const PrefillProgress& progress, const std::atomic<bool>* cancel,
                        const LogitsSink& sink, int64_t sink_from, std::span<float> logits) {
  const ModelConfig& c = config();
  const auto n = int64_t(ids.size());
  const int64_t piece = sink ? chunk_ : span_, start = tokens();
  int64_t count = 0;
  if (graph_->sparse() != nullptr) LONGKV_TRY(graph_->sparse()->begin_prompt(stream_.get()));
  for (int64_t begin = 0; begin < n; begin += count) {
    count = std::min(piece, n - begin);
    LONGKV_TRY(span(ids.subspan(size_t(begin), size_t(count)), start + begin, begin, n, start + n, progress, cancel));
    if (sink && begin + count > sink_from) {
      const int64_t first = std::max(sink_from, begin);
      LONGKV_TRY(deliver(first, begin + count - first, first - begin, sink));
    }
  }
  LONGKV_TRY(graph_->output(hidden_.as<float>() + (count - 1) * c.dim, stream_.get()));
  LONGKV_TRY(cuda_status(
      cudaMemcpyAsync(host_.logits, graph_->logits(), size_t(c.vocab) * 4, cudaMemcpyDeviceToHost, stream_.get()),
      "logits"));
  LONGKV_TRY(stream_.wait("logits of a prompt"));
  std::memcpy(logits.data(), host_.logits, size_t(c.vocab) * 4);
  if (graph_->sparse() == nullptr) return {};
  LONGKV_ASSIGN(const PrefillPairs pairs, graph_->sparse()->pairs(stream_.get()));
  log_verbose("prompt of {} tokens: {:.2f}% of the attention scores computed", n,
              100.0 * double(pairs.attended) / double(std::max<int64_t>(1, pairs.causal)));
  return {};
}

}  // namespace longkv

#endif
