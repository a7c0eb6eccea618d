#ifdef LONGKV_WITH_CUDA

#include "cuda/upload.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/ops.h"
#include "ops/packed_rows.h"

namespace longkv {

Result<std::unique_ptr<WeightUpload>> WeightUpload::create(CardMemory& memory, cudaStream_t stream, int threads) {
  std::unique_ptr<WeightUpload> upload(new WeightUpload(stream, threads));
  for (int i = 0; i < 2; ++i) {
    LONGKV_ASSIGN(upload->host_[i], PinnedBuffer::create(kPiece, "staging of weights"));
    LONGKV_ASSIGN(upload->raw_[i], CardBuffer::create(memory, kPiece, "staging of weights"));
    LONGKV_TRY(cuda_status(cudaEventCreateWithFlags(&upload->done_[i], cudaEventDisableTiming), "creating an event"));
  }
  return upload;
}

WeightUpload::~WeightUpload() {
  (void)cudaStreamSynchronize(stream_);
  for (cudaEvent_t e : done_) {
    if (e != nullptr) (void)cudaEventDestroy(e);
  }
}

Status WeightUpload::stack(const CardStack& to) {
  auto source = to.sources.begin();
  for (const CardMatrix& m : to.parts) {
    for (int64_t first = 0; first < m.rows; first += (*source++)->rows) LONGKV_TRY(rows_of(m, **source, first));
  }
  return {};
}

// All rows of w to rows of m from `first` on.
Status WeightUpload::rows_of(const CardMatrix& m, const Weight& w, int64_t first) {
  constexpr int64_t kTask = int64_t(1) << 20;  // bytes
  const int64_t per_piece = kPiece / w.row_bytes, per_task = std::max<int64_t>(1, kTask / w.row_bytes);
  if (per_piece == 0) return fail(Code::kUnsupported, "rows of {} bytes are too long for the card", w.row_bytes);
  for (int64_t r = 0; r < w.rows; r += per_piece) {
    const int64_t n = std::min(per_piece, w.rows - r);
    const int i = next_;
    next_ = 1 - next_;
    LONGKV_TRY(cuda_status(cudaEventSynchronize(done_[i]), "copying weights"));
    pool_.run(ceil_div(n, per_task), [&](int64_t task, int) {
      const int64_t at = task * per_task, count = std::min(per_task, n - at);
      uint8_t* to = host_[i].as<uint8_t>() + at * w.row_bytes;
      if (w.packed != nullptr) return unpack_rows(w, r + at, count, to);
      std::memcpy(to, w.row(r + at), size_t(count * w.row_bytes));
    });
    LONGKV_TRY(cuda_status(cudaMemcpyAsync(raw_[i].data(), host_[i].as<uint8_t>(), size_t(n * w.row_bytes),
                                           cudaMemcpyHostToDevice, stream_),
                           "copying weights"));
    LONGKV_TRY(card::pack_rows(m, raw_[i].data(), w.row_bytes, first + r, n, stream_));
    LONGKV_TRY(cuda_status(cudaEventRecord(done_[i], stream_), "copying weights"));
  }
  return {};
}

}  // namespace longkv

#endif
