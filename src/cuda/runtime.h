// Memory, streams and errors of the card as values. Only for sources that are built with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "longkv/status.h"

namespace longkv {

class ThreadPool;

// `what`: the kernel or call, so that the message names it.
Status cuda_status(cudaError_t error, const std::string& what);

// Errors: kUnsupported when the build holds no code for the present card.
Status kernels_fit_card();

// Device memory under a hard cap. One per card and owner; must outlive its buffers.
class CardMemory {
 public:
  // cap 0: what the card has.
  explicit CardMemory(int64_t cap) : cap_(cap) {}
  CardMemory(const CardMemory&) = delete;
  CardMemory& operator=(const CardMemory&) = delete;

  int64_t used() const { return used_; }
  int64_t peak() const { return peak_; }
  int64_t cap() const { return cap_; }

 private:
  friend class CardBuffer;
  int64_t cap_;
  int64_t used_ = 0, peak_ = 0;
};

// A piece of device memory.
class CardBuffer {
 public:
  CardBuffer() = default;
  ~CardBuffer() { reset(); }
  CardBuffer(CardBuffer&& o) noexcept { *this = std::move(o); }
  CardBuffer& operator=(CardBuffer&& o) noexcept;

  // `name` stands in the error: kOutOfMemory over the cap or when the card refuses.
  static Result<CardBuffer> create(CardMemory& memory, int64_t bytes, const std::string& name);

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  int64_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }
  void reset();

 private:
  CardMemory* memory_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Pinned host memory.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer() { reset(); }
  PinnedBuffer(PinnedBuffer&& o) noexcept { *this = std::move(o); }
  PinnedBuffer& operator=(PinnedBuffer&& o) noexcept;
  static Result<PinnedBuffer> create(int64_t bytes, const std::string& name);

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void reset();
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Host memory that the card reads and writes in place. The system's pages are taken first, by all threads of the pool,
// then made known to the card: nothing is copied or held twice.
class SharedRows {
 public:
  SharedRows() = default;
  ~SharedRows() { reset(); }
  SharedRows(SharedRows&& o) noexcept { *this = std::move(o); }
  SharedRows& operator=(SharedRows&& o) noexcept;
  static Result<SharedRows> create(int64_t bytes, const std::string& name, ThreadPool& pool);

  uint8_t* host() const { return host_; }
  uint8_t* on_card() const { return on_card_; }  // the same bytes as the card addresses them
  int64_t bytes() const { return bytes_; }

 private:
  void reset();
  uint8_t *host_ = nullptr, *on_card_ = nullptr;
  int64_t bytes_ = 0;
  bool registered_ = false;
};

// Memory that somebody else holds, made known to the card, which then copies from it at the bus's full rate.
class PinnedPages {
 public:
  PinnedPages() = default;
  ~PinnedPages();
  PinnedPages(const PinnedPages&) = delete;
  PinnedPages& operator=(const PinnedPages&) = delete;

  // Ranges (data, bytes) in any order; neighbours share pages. What the system does not pin stays as it was.
  void add(std::vector<std::pair<const uint8_t*, int64_t>> ranges);
  bool holds(const uint8_t* data, int64_t bytes) const;
  int64_t bytes() const;

 private:
  std::vector<std::pair<uintptr_t, uintptr_t>> pinned_;  // begin, end; ascending
};

// A stream of its own, destroyed with the owner.
class CardStream {
 public:
  CardStream() = default;
  ~CardStream();
  CardStream(CardStream&& o) noexcept { *this = std::move(o); }
  CardStream& operator=(CardStream&& o) noexcept;
  static Result<CardStream> create();

  cudaStream_t get() const { return stream_; }
  // Errors of everything queued before show here; `what` says what that was.
  Status wait(const std::string& what) const { return cuda_status(cudaStreamSynchronize(stream_), what); }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `work` queues on the stream, as a graph, which the caller destroys. Where one of the two fails nothing is left
// behind: neither a recording nor an error that the next launch would report.
Result<cudaGraphExec_t> capture_work(cudaStream_t stream, const std::function<Status()>& work);

}  // namespace longkv
