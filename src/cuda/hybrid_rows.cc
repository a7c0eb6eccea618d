#ifdef LONGKV_WITH_CUDA

#include "cuda/hybrid_rows.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"

namespace longkv {

namespace {
constexpr int64_t kSlotStep = 4;                // keeps every plane at multiples of 256 bytes
constexpr int64_t kSpare = int64_t(256) << 20;  // left to the driver where no cap is given
}  // namespace

int64_t HybridRows::Shape::count() const { return std::count(layers.begin(), layers.end(), true); }
int64_t HybridRows::Shape::blocks() const { return ceil_div(context, block); }
int64_t HybridRows::Shape::host_bytes() const {
  return count() * kv_heads * blocks() * card::place_store(type, kv_heads, dim, block, 0, nullptr).record;
}

namespace {
// Of one slot of every layer and head.
int64_t slot_bytes(const HybridRows::Shape& s) {
  return s.count() * s.kv_heads * card::place_store(s.type, s.kv_heads, s.dim, s.block, 0, nullptr).record;
}
int64_t slot_tables(const HybridRows::Shape& s) { return (s.count() * 2 + 2) * s.kv_heads * int64_t(sizeof(int32_t)); }
int64_t fewest_slots(const HybridRows::Shape& s) { return round_up(std::min(s.list_blocks, s.blocks()), kSlotStep); }
int64_t most_slots(const HybridRows::Shape& s) { return round_up(s.blocks(), kSlotStep); }
int64_t work_bytes(const HybridRows::Shape& s) {
  return card::card_kv_bytes(KvType::kF16, s.kv_heads, s.dim, round_up(s.context, 16));
}
int64_t staging_bytes(const HybridRows::Shape& s) {
  return round_up(card::card_kv_bytes(s.type, s.kv_heads, s.dim, s.chunk), 256);
}
int64_t block_tables(const HybridRows::Shape& s) {
  return round_up(s.count() * s.kv_heads * s.blocks() * int64_t(sizeof(int32_t)), 256);
}
}  // namespace

int64_t HybridRows::Shape::least_bytes() const {
  return std::max(work_bytes(*this), fewest_slots(*this) * slot_bytes(*this)) +
         fewest_slots(*this) * slot_tables(*this);
}
int64_t HybridRows::Shape::fixed_bytes() const { return 2 * staging_bytes(*this) + block_tables(*this) + 4096; }

Result<std::unique_ptr<HybridRows>> HybridRows::create(CardMemory& memory, const Shape& shape, ThreadPool& pool) {
  std::unique_ptr<HybridRows> rows(new HybridRows());
  rows->shape_ = shape;
  LONGKV_TRY(rows->allocate(memory, pool));
  return rows;
}

HybridRows::~HybridRows() {
  if (bus_.get() != nullptr) (void)cudaStreamSynchronize(bus_.get());
  for (Staging& s : staging_) {
    if (s.ready != nullptr) (void)cudaEventDestroy(s.ready);
    if (s.gone != nullptr) (void)cudaEventDestroy(s.gone);
  }
}

Status HybridRows::allocate(CardMemory& memory, ThreadPool& pool) {
  const Shape& s = shape_;
  store_ = card::place_store(s.type, s.kv_heads, s.dim, s.block, s.blocks(), nullptr);
  LONGKV_ASSIGN(bus_, CardStream::create());
  LONGKV_ASSIGN(staging_memory_, CardBuffer::create(memory, 2 * staging_bytes(s), "rows on their way to memory"));
  for (int i = 0; i < 2; ++i) {
    staging_[i].kv = card::place_kv(s.type, s.kv_heads, s.dim, s.chunk, staging_memory_.data() + i * staging_bytes(s));
    for (cudaEvent_t* e : {&staging_[i].ready, &staging_[i].gone})
      LONGKV_TRY(cuda_status(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "creating an event"));
  }

  size_t free = 0, total = 0;
  LONGKV_TRY(cuda_status(cudaMemGetInfo(&free, &total), "asking for free memory"));
  int64_t left = int64_t(free) - kSpare;
  if (memory.cap() > 0) left = std::min(left, memory.cap() - memory.used());
  left -= block_tables(s) + 4096;
  if (left < s.least_bytes()) {
    return fail(Code::kOutOfMemory,
                "the present layer's rows of {} tokens, or the blocks of one step, need {} MiB of VRAM, {} are left",
                s.context, s.least_bytes() >> 20, std::max<int64_t>(0, left) >> 20);
  }
  slots_ = std::min(most_slots(s), left / (slot_bytes(s) + slot_tables(s)) / kSlotStep * kSlotStep);
  slots_ = std::max(slots_, fewest_slots(s));
  // block_of_ and used_ follow slot_of_: one fill empties all three.
  const int64_t entries = s.count() * s.kv_heads;
  table_bytes_ = block_tables(s) + entries * slots_ * 8;
  LONGKV_ASSIGN(tables_, CardBuffer::create(memory, block_tables(s) + slots_ * slot_tables(s) + 4096,
                                            "tables of the blocks on the card"));
  slot_of_ = tables_.as<int32_t>();
  block_of_ = slot_of_ + block_tables(s) / int64_t(sizeof(int32_t));
  used_ = block_of_ + entries * slots_;
  missing_ = used_ + entries * slots_;
  count_ = missing_ + s.kv_heads * slots_ * 2;
  totals_ = reinterpret_cast<unsigned long long*>(tables_.data() + tables_.bytes() - 16);
  LONGKV_TRY(cuda_status(cudaMemset(tables_.data(), 0, size_t(tables_.bytes())), "tables of the blocks on the card"));
  LONGKV_ASSIGN(hot_memory_, CardBuffer::create(memory, std::max(work_bytes(s), slots_ * slot_bytes(s)),
                                                "blocks on the card, and one layer's rows"));
  work_ = card::place_kv(KvType::kF16, s.kv_heads, s.dim, round_up(s.context, 16), hot_memory_.data());

  int held = 0;
  for (const bool here : s.layers) {
    index_.push_back(here ? held++ : -1);
    if (!here) continue;
    LONGKV_ASSIGN(SharedRows rows, SharedRows::create(s.kv_heads * s.blocks() * store_.record,
                                                      fmt::format("the KV rows of layer {}, {} of {} layers",
                                                                  index_.size() - 1, held, s.count()),
                                                      pool));
    rows_.push_back(std::move(rows));
  }
  return {};
}

card::BlockStore HybridRows::store(int layer) const {
  card::BlockStore s = store_;
  s.data = rows_[size_t(index_[size_t(layer)])].on_card();
  return s;
}

card::HotBlocks HybridRows::hot(int layer) const {
  const int64_t i = index_[size_t(layer)], entry = i * shape_.kv_heads;
  card::HotBlocks h;
  h.pool = card::place_kv(shape_.type, shape_.kv_heads, shape_.dim, slots_ * shape_.block,
                          hot_memory_.data() + entry * slots_ * store_.record);
  h.slots = slots_;
  h.slot_of = slot_of_ + entry * store_.blocks;
  h.block_of = block_of_ + entry * slots_;
  h.used = used_ + entry * slots_;
  h.missing = missing_;
  h.count = count_;
  h.totals = totals_;
  return h;
}

Status HybridRows::begin_layer(int layer, int64_t start, cudaStream_t stream) {
  empty_ = false;  // work() lies where the blocks did
  if (start == 0) return {};
  LONGKV_TRY(finish(stream));  // they may be on their way yet
  crossed_ += start * shape_.kv_heads * (store_.record / shape_.block);
  return card::bring_rows(store(layer), start, work_, stream);
}

Result<card::CardKv> HybridRows::stage(int64_t first, cudaStream_t stream) {
  const Staging& s = staging_[next_];
  LONGKV_TRY(cuda_status(cudaStreamWaitEvent(stream, s.gone), "rows on their way to memory"));
  // Rows are addressed by position.
  card::CardKv kv = s.kv;
  const int64_t values = first * card::value_bytes(kv.type, kv.dim),
                scales = first * card::scale_count(kv.type, kv.dim);
  kv.k -= values;
  kv.v -= values;
  if (kv.k_scale != nullptr) kv.k_scale -= scales, kv.v_scale -= scales;
  return kv;
}

Status HybridRows::spill(int layer, int64_t first, int64_t n, cudaStream_t stream) {
  LONGKV_ASSIGN(const card::CardKv kv, stage(first, stream));
  const Staging& s = staging_[next_];
  next_ = 1 - next_;
  LONGKV_TRY(cuda_status(cudaEventRecord(s.ready, stream), "rows on their way to memory"));
  LONGKV_TRY(cuda_status(cudaStreamWaitEvent(bus_.get(), s.ready), "rows on their way to memory"));
  LONGKV_TRY(card::spill_rows(kv, store(layer), first, n, bus_.get()));
  crossed_ += n * shape_.kv_heads * (store_.record / shape_.block);
  return cuda_status(cudaEventRecord(s.gone, bus_.get()), "rows on their way to memory");
}

Status HybridRows::finish(cudaStream_t stream) {
  for (const Staging& s : staging_)
    LONGKV_TRY(cuda_status(cudaStreamWaitEvent(stream, s.gone), "rows on their way to memory"));
  return {};
}

Status HybridRows::prepare(cudaStream_t stream) {
  if (empty_) return {};
  empty_ = true;
  return cuda_status(cudaMemsetAsync(tables_.data(), 0xff, size_t(table_bytes_), stream),
                     "tables of the blocks on the card");
}

}  // namespace longkv

#endif
