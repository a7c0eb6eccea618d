// Common part of the kinds that sum up a block in one or a few vectors.
//
// A kind says how a row enters the state of the open block (fp32) and how a state is encoded; everything else (storage,
// incremental maintenance, truncation, scanning) is here. Rows enter one by one in ascending order however they
// arrive, so an index built row by row equals one built at once, bit for bit.
#pragma once

#include <cstdint>
#include <vector>

#include "base/float16.h"
#include "base/virtual_array.h"
#include "kv/index/index.h"
#include "kv/index/scan.h"

namespace longkv {

class VectorIndex : public BlockIndex {
 public:
  void append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) override;
  void truncate(int kv_head, const KvHeadView& keys, int64_t rows) override;
  void score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
             int64_t stride) const override;
  bool adds_up() const override {
    return rule_ == ScanRule::kBox || rule_ == ScanRule::kCentre || (rule_ == ScanRule::kMaxDot && slots_ == 1);
  }
  void fold(const float* q, int n_q, float* folded) const override;
  void score_folded(int kv_head, const float* folded, int64_t block_begin, int64_t block_end, Place ahead,
                    float* scores) const override;
  int64_t blocks(int kv_head) const override;
  int64_t bytes_scored(int64_t n) const override { return n * tile_bytes() / kTileBlocks; }
  int64_t bytes_held() const override;
  void visit(KvState& state, std::span<const KvHeadView> heads) override;

  Status reserve(int64_t capacity_rows);

 protected:
  // How a block's summary is stored: halves, or, for centres and widths, bytes with a scale per block and slot. kBound:
  // widths grow by what rounding takes, so that q.centre + |q|.width stays a bound.
  enum class Form { kHalf, kByte, kByteBound };

  // Summaries of `slots` vectors; the state of an open block has `state_vectors` fp32 vectors (0: as many as slots).
  VectorIndex(const KvShape& shape, int64_t block, int slots, ScanRule rule, int64_t state_vectors = 0,
              Form form = Form::kHalf)
      : block_(block),
        dim_(shape.dim_k),
        slots_(slots),
        rule_(rule),
        state_vectors_(state_vectors > 0 ? state_vectors : slots),
        form_(form),
        heads_(size_t(shape.kv_heads)) {}

  // Row r of its block joins the state ([slots][dim]); r = 0 starts it.
  virtual void add_row(float* state, const float* row, int64_t r) const = 0;
  // The summary ([slots][dim]) of a block of `count` rows in halves.
  virtual void encode(const float* state, int64_t count, f16_t* summary) const = 0;
  // Kinds that may be stored in bytes: the summary in fp32.
  virtual void encode_exact(const float* /*state*/, int64_t /*count*/, float* /*summary*/) const {}

  void write_summary(int kv_head, int64_t block, const f16_t* summary);
  int64_t rows(int kv_head) const { return heads_[size_t(kv_head)].rows; }

  const int64_t block_;
  const int64_t dim_;
  const int slots_;

 private:
  struct Head {
    int64_t rows = 0;
    std::vector<float> state;    // of the open block
    std::vector<f16_t> summary;  // scratch
    std::vector<float> exact;    // scratch
    std::vector<float> keys;     // scratch: decoded rows
  };
  int64_t tile_bytes() const {
    return form_ == Form::kHalf ? slots_ * dim_ * kTileBlocks * int64_t(sizeof(f16_t)) : scan8_tile_bytes(dim_);
  }
  uint8_t* tile(int kv_head, int64_t t);
  const uint8_t* tile(int kv_head, int64_t t) const { return const_cast<VectorIndex*>(this)->tile(kv_head, t); }
  void write_open(int kv_head, int64_t block, int64_t count);
  void write_bytes(int kv_head, int64_t block, const float* exact);
  void scan(int kv_head, int64_t first, int64_t tiles, const float* q, int n_q, float* scores, int64_t stride) const;
  void scan_folded(int kv_head, int64_t first, int64_t tiles, const float* folded, const uint8_t* ahead,
                   float* scores) const;
  // scan(first tile, tiles, scores, stride) over the whole tiles of [block_begin, block_end), and over parts of tiles
  // aside.
  template <class Scan>
  void over_tiles(int64_t block_begin, int64_t block_end, int n_q, float* scores, int64_t stride,
                  const Scan& scan) const;

  const ScanRule rule_;
  const int64_t state_vectors_;
  const Form form_;
  std::vector<Head> heads_;
  VirtualArray tiles_;  // [kv_heads][tiles of the capacity]; pages are paid for as blocks are written
  int64_t head_tiles_ = 0;
};

// Half floats that never lie inside of what they bound. Values beyond half's range stop at its largest number, so that
// a zero query channel times a bound stays zero.
f16_t f16_at_least(float v);
f16_t f16_at_most(float v);

}  // namespace longkv
