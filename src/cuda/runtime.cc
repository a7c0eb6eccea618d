#ifdef LONGKV_WITH_CUDA

#include "cuda/runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "base/threads.h"

namespace longkv {

Status cuda_status(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // an error that does not end the context must not be met again by the next call
  if (error == cudaErrorMemoryAllocation) return fail(Code::kOutOfMemory, "{}: the card is out of memory", what);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion)
    return fail(Code::kUnsupported, "{}: this build has no code for this card (LONGKV_CUDA_ARCHS)", what);
  return fail(Code::kInternal, "{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

CardBuffer& CardBuffer::operator=(CardBuffer&& o) noexcept {
  std::swap(memory_, o.memory_);
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

Result<CardBuffer> CardBuffer::create(CardMemory& memory, int64_t bytes, const std::string& name) {
  if (bytes < 0) return fail(Code::kInternal, "{}: {} bytes asked for", name, bytes);
  if (memory.cap_ > 0 && bytes > memory.cap_ - memory.used_) {
    return fail(Code::kOutOfMemory, "{} needs {} MiB of VRAM, {} of the cap of {} MiB are left", name, bytes >> 20,
                (memory.cap_ - memory.used_) >> 20, memory.cap_ >> 20);
  }
  CardBuffer b;
  if (bytes == 0) return b;
  if (const cudaError_t e = cudaMalloc(&b.data_, size_t(bytes)); e != cudaSuccess) {
    (void)cudaGetLastError();
    return fail(Code::kOutOfMemory, "{}: the card refuses {} MiB ({}); {} MiB are in use by this program", name,
                bytes >> 20, cudaGetErrorString(e), memory.used_ >> 20);
  }
  b.memory_ = &memory;
  b.bytes_ = bytes;
  memory.used_ += bytes;
  memory.peak_ = std::max(memory.peak_, memory.used_);
  return b;
}

void CardBuffer::reset() {
  if (data_ == nullptr) return;
  (void)cudaFree(data_);
  memory_->used_ -= bytes_;
  data_ = nullptr;
  bytes_ = 0;
}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

Result<PinnedBuffer> PinnedBuffer::create(int64_t bytes, const std::string& name) {
  PinnedBuffer b;
  if (const cudaError_t e = cudaMallocHost(&b.data_, size_t(bytes)); e != cudaSuccess) {
    (void)cudaGetLastError();
    return fail(Code::kOutOfMemory, "{}: the system refuses {} MiB of pinned memory ({})", name, bytes >> 20,
                cudaGetErrorString(e));
  }
  b.bytes_ = bytes;
  return b;
}

void PinnedBuffer::reset() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);
  data_ = nullptr;
}

SharedRows& SharedRows::operator=(SharedRows&& o) noexcept {
  std::swap(host_, o.host_);
  std::swap(on_card_, o.on_card_);
  std::swap(bytes_, o.bytes_);
  std::swap(registered_, o.registered_);
  return *this;
}

Result<SharedRows> SharedRows::create(int64_t bytes, const std::string& name, ThreadPool& pool) {
  SharedRows m;
  constexpr int64_t kPiece = int64_t(2) << 20;
  m.bytes_ = round_up(bytes, kPiece);
  void* mapped = mmap(nullptr, size_t(m.bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED)
    return fail(Code::kOutOfMemory, "{}: the system refuses {} MiB of memory", name, bytes >> 20);
  m.host_ = static_cast<uint8_t*>(mapped);
  (void)madvise(mapped, size_t(m.bytes_), MADV_HUGEPAGE);
  pool.run(m.bytes_ / kPiece, [&](int64_t piece, int) {
    for (int64_t at = piece * kPiece; at < (piece + 1) * kPiece; at += 4096) m.host_[at] = 0;
  });
  cudaError_t e = cudaHostRegister(m.host_, size_t(m.bytes_), cudaHostRegisterMapped);
  m.registered_ = e == cudaSuccess;
  void* seen = nullptr;
  if (e == cudaSuccess) e = cudaHostGetDevicePointer(&seen, m.host_, 0);
  if (e != cudaSuccess) {
    (void)cudaGetLastError();
    return fail(Code::kOutOfMemory,
                "{}: the system refuses to pin {} MiB of memory ({}); raise the limit of locked memory (ulimit -l), or "
                "use --kv-place cpu, which pins none of it",
                name, bytes >> 20, cudaGetErrorString(e));
  }
  m.on_card_ = static_cast<uint8_t*>(seen);
  return m;
}

void SharedRows::reset() {
  if (registered_) (void)cudaHostUnregister(host_);
  if (host_ != nullptr) (void)munmap(host_, size_t(bytes_));
  host_ = on_card_ = nullptr;
  registered_ = false;
}

CardStream& CardStream::operator=(CardStream&& o) noexcept {
  std::swap(stream_, o.stream_);
  return *this;
}

CardStream::~CardStream() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

Result<CardStream> CardStream::create() {
  CardStream s;
  LONGKV_TRY(cuda_status(cudaStreamCreateWithFlags(&s.stream_, cudaStreamNonBlocking), "creating a stream"));
  return s;
}

Result<cudaGraphExec_t> capture_work(cudaStream_t stream, const std::function<Status()>& work) {
  LONGKV_TRY(cuda_status(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a step"));
  const Status queued = work();
  cudaGraph_t graph = nullptr;
  const Status ended = cuda_status(cudaStreamEndCapture(stream, &graph), "recording a step");
  cudaGraphExec_t step = nullptr;
  Status made = queued.ok() ? ended : queued;
  if (made.ok()) made = cuda_status(cudaGraphInstantiate(&step, graph, 0), "recording a step");
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  LONGKV_TRY(made);
  return step;
}

PinnedPages::~PinnedPages() {
  for (const auto& [begin, end] : pinned_) (void)cudaHostUnregister(reinterpret_cast<void*>(begin));
}

void PinnedPages::add(std::vector<std::pair<const uint8_t*, int64_t>> ranges) {
  constexpr uintptr_t kPage = 4096;
  std::sort(ranges.begin(), ranges.end());
  std::vector<std::pair<uintptr_t, uintptr_t>> pages;
  for (const auto& [data, bytes] : ranges) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes) + kPage - 1) / kPage * kPage;
    if (!pages.empty() && begin <= pages.back().second) {
      pages.back().second = std::max(pages.back().second, end);
    } else {
      pages.emplace_back(begin, end);
    }
  }
  for (const auto& [begin, end] : pages) {
    void* at = reinterpret_cast<void*>(begin);
    // Pages of a file that is mapped for reading can be pinned for reading alone.
    cudaError_t done = cudaHostRegister(at, end - begin, cudaHostRegisterDefault);
    if (done != cudaSuccess) {
      (void)cudaGetLastError();
      done = cudaHostRegister(at, end - begin, cudaHostRegisterReadOnly);
    }
    if (done == cudaSuccess) {
      pinned_.emplace_back(begin, end);
    } else {
      (void)cudaGetLastError();
    }
  }
}

bool PinnedPages::holds(const uint8_t* data, int64_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(data);
  return std::any_of(pinned_.begin(), pinned_.end(),
                     [&](const auto& range) { return range.first <= at && at + uintptr_t(bytes) <= range.second; });
}

int64_t PinnedPages::bytes() const {
  int64_t all = 0;
  for (const auto& [begin, end] : pinned_) all += int64_t(end - begin);
  return all;
}

}  // namespace longkv

#endif
