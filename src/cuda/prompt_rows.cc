#ifdef LONGKV_WITH_CUDA

#include "cuda/prompt_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "kv/layout.h"

namespace longkv {

namespace {
constexpr int64_t kStaging = int64_t(32) << 20;  // bytes
constexpr int64_t kTaskRows = 256;
constexpr int64_t kLeftFree = int64_t(512) << 20;  // bytes of the card that copies never take: others need some too
}  // namespace

Result<CardBuffer> CardPromptRows::take(int64_t bytes, const std::string& name) {
  for (;;) {
    size_t free = 0, total = 0;
    LONGKV_TRY(cuda_status(cudaMemGetInfo(&free, &total), "asking for free memory"));
    const bool crowded = int64_t(free) - bytes < kLeftFree;
    if (!crowded || entries_.empty()) {
      auto made = CardBuffer::create(memory_, bytes, name);
      if (made.ok() || entries_.empty()) return made;
    }
    LONGKV_TRY(cuda_status(cudaStreamSynchronize(stream_), "attention of a chunk"));
    entries_.erase(std::min_element(entries_.begin(), entries_.end(),
                                    [](const Entry& a, const Entry& b) { return a.used < b.used; }));
  }
}

Status CardPromptRows::grow(CardBuffer& buffer, int64_t bytes, const std::string& name) {
  if (buffer.bytes() >= bytes) return {};
  LONGKV_TRY(cuda_status(cudaStreamSynchronize(stream_), name));
  buffer.reset();
  LONGKV_ASSIGN(buffer, take(bytes, name));
  return {};
}

void CardPromptRows::forget(uint64_t prompt_id) {
  (void)cudaStreamSynchronize(stream_);
  std::erase_if(entries_, [&](const Entry& e) { return e.id == prompt_id; });
}

// Rows [begin, end) of all heads, one after the other.
Status CardPromptRows::copy(const ChunkAttention& a, bool values, int64_t begin, int64_t end, float* to) {
  const int64_t width = values ? a.dim_v : a.dim_k, bytes = width * 4, rows = end - begin, all = a.kv_heads * rows;
  const int64_t per_piece = std::max<int64_t>(1, staging_.bytes() / bytes);
  for (int64_t first = 0; first < all; first += per_piece) {
    const int64_t n = std::min(per_piece, all - first);
    pool_.run(ceil_div(n, kTaskRows), [&](int64_t task, int) {
      for (int64_t i = task * kTaskRows; i < std::min(n, (task + 1) * kTaskRows); ++i) {
        const KvHeadView& view = a.prompt[size_t((first + i) / rows)];
        const int64_t row = begin + (first + i) % rows;
        const uint8_t* from = values ? view.v + row * view.v_stride : view.k + row * view.k_stride;
        std::memcpy(staging_.as<uint8_t>() + i * bytes, from, size_t(bytes));
      }
    });
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(to + first * width, staging_.as<uint8_t>(), size_t(n * bytes), cudaMemcpyHostToDevice, stream_),
        "rows of a prompt"));
    LONGKV_TRY(cuda_status(cudaStreamSynchronize(stream_), "rows of a prompt"));  // the staging buffer is free again
  }
  return {};
}

Result<CardPromptRows::Rows> CardPromptRows::get(const ChunkAttention& a) {
  const KvHeadView& view = a.prompt[0];
  for (const KvHeadView& other : a.prompt) {
    if (other.rows == view.rows && other.first_row == view.first_row && other.bias == nullptr) continue;
    return fail(Code::kUnsupported,
                "a card attends chunks behind caches whose heads hold the same rows as they were read; this one's were "
                "evicted or merged");
  }
  const int64_t visible = std::max(view.first_row, first_visible_row(view.rows, a.window));
  if (visible >= view.rows) return Rows{};
  // All that is held serves every question of a document; a sliding window sees little of it.
  const int64_t begin = a.window > 0 ? visible : view.first_row;
  const int64_t end = a.window > 0 ? view.rows : std::max(a.held, view.rows);
  auto found = std::find_if(entries_.begin(), entries_.end(),
                            [&](const Entry& e) { return e.id == a.prompt_id && e.layer == a.layer; });
  const bool covers = found != entries_.end() && a.prompt_id != 0 && found->begin <= visible && found->end >= view.rows;
  if (!covers) {
    if (found != entries_.end()) {
      LONGKV_TRY(cuda_status(cudaStreamSynchronize(stream_), "attention of a chunk"));
      entries_.erase(found);
    }
    if (staging_.bytes() == 0) {
      LONGKV_ASSIGN(staging_, PinnedBuffer::create(std::max(kStaging, int64_t(std::max(a.dim_k, a.dim_v)) * 4),
                                                   "staging of a prompt's rows"));
    }
    Entry entry{a.prompt_id, a.layer, begin, end, 0, {}};
    const int64_t rows = a.kv_heads * (end - begin);
    LONGKV_ASSIGN(entry.memory, take(rows * (a.dim_k + a.dim_v) * 4,
                                     fmt::format("layer {}'s rows of a prompt of {} tokens in fp32", a.layer, end)));
    LONGKV_TRY(copy(a, false, begin, end, entry.memory.as<float>()));
    LONGKV_TRY(copy(a, true, begin, end, entry.memory.as<float>() + rows * a.dim_k));
    ++uploads_;
    entries_.push_back(std::move(entry));
    found = entries_.end() - 1;
  }
  found->used = ++clock_;
  const float* k = found->memory.as<float>();
  return Rows{k, k + a.kv_heads * (found->end - found->begin) * a.dim_k, found->begin, found->end};
}

}  // namespace longkv

#endif
