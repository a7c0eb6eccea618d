// Keys and values of one layer on the card, and the operators over them.
#pragma once

#include <cstdint>

#include "cuda/ops.h"
#include "kv/types.h"

#ifdef __CUDACC__
#define LONGKV_ON_BOTH __host__ __device__
#else
#define LONGKV_ON_BOTH
#endif

namespace longkv::card {

// Of one row: bytes of its values, and its scales (one for 32 channels; fp8: one for the row).
LONGKV_ON_BOTH constexpr int value_bytes(KvType type, int dim) {
  return type == KvType::kQ4_0 ? dim / 2 : type == KvType::kQ8_0 || type == KvType::kFp8 ? dim : 2 * dim;
}
LONGKV_ON_BOTH constexpr int scale_count(KvType type, int dim) {
  return type == KvType::kFp8 ? 1 : type == KvType::kQ8_0 || type == KvType::kQ4_0 ? dim / 32 : 0;
}
// Whether prompts attend rows as they are stored; else one layer's rows in f16.
constexpr bool attended_in_place(KvType type) { return type == KvType::kF16 || type == KvType::kBf16; }

// Rows of one layer: [kv_heads][capacity][dim]. Types f16, bf16, q8_0, q4_0 and fp8, the same for K and V.
//   q8_0  signed bytes, a half per 32 channels
//   q4_0  32-bit words of 8 channels: channel 2 i in bits 4 i, channel 2 i + 1 in bits 16 + 4 i, plus 8; a half per 32
//   fp8   E4M3 bytes, a bfloat16 per row
struct CardKv {
  KvType type = KvType::kF16;
  int kv_heads = 0;
  int dim = 0;  // channels of K and V rows
  int64_t capacity = 0;
  uint8_t* k = nullptr;
  uint8_t* v = nullptr;
  half_t* k_scale = nullptr;  // [kv_heads][capacity][scale_count]
  half_t* v_scale = nullptr;
  // [kv_heads][capacity], added to a row's scores (natural logarithm, after a cap); minus infinity: the row counts for
  // nothing. nullptr: none. Of decoded tokens alone (attend_token()), without a ring.
  const float* bias = nullptr;
  // Above 0: only the first `fixed` rows and the last ones are here (cuda/old.h has the others), as capacity =
  // fixed + ring; both are multiples of 16.
  int64_t fixed = 0, ring = 0;
  LONGKV_ON_BOTH int64_t place(int64_t row) const {
    return ring == 0 || row < fixed ? row : fixed + (row - fixed) % ring;
  }
};
bool card_kv_supports(KvType type, int dim);
// Bytes of one layer.
int64_t card_kv_bytes(KvType type, int kv_heads, int dim, int64_t capacity);
CardKv place_kv(KvType type, int kv_heads, int dim, int64_t capacity, uint8_t* memory);

// Rows of one layer in memory, which the card reads and writes over the bus: [kv_heads][blocks] records, each the rows
// of one block: its K, its V, and where there are any the scales of K and of V. A record is the unit of transfer, so it
// is contiguous.
struct BlockStore {
  KvType type = KvType::kF16;
  int kv_heads = 0;
  int dim = 0;
  int block = 16;      // rows
  int64_t blocks = 0;  // of a head
  int64_t plane = 0;   // bytes of a block's K; of its V
  int64_t scales = 0;  // bytes of the scales of its K; of its V
  int64_t record = 0;  // bytes
  uint8_t* data = nullptr;
};
BlockStore place_store(KvType type, int kv_heads, int dim, int block, int64_t blocks, uint8_t* memory);
inline int64_t store_bytes(const BlockStore& s) { return s.kv_heads * s.blocks * s.record; }

// cos and sin of n positions from first on: out[n][half][2]. fine [1024][half][2] and coarse [...][half][2] hold cos
// and sin of position % 1024 and of 1024 * (position / 1024) in double, magnitude apart (model/rope.h). `first` is read
// on the card.
struct CardRope {
  const double* fine = nullptr;
  const double* coarse = nullptr;
  int half = 0;  // pairs of channels
  RopePairs pairs = RopePairs::kAdjacent;
  float magnitude = 1.0f;
};
// *to = position, for the two that read a position on the card; the value is the launch's own, of no memory of the
// host.
Status set_position(int64_t* to, int64_t position, CardStreamHandle stream);
Status rope_angles(const CardRope& rope, const int64_t* first, int64_t n, float* out, CardStreamHandle stream);

// After the products of q, k and v: bias, norm of heads, rotation; queries to q as halves (bfloat16 when the rows are),
// keys and values to rows [first, first + n) of kv, and, when given, what those rows read back as to `work` (f16).
// Without rows of its own (kv.k nullptr) kv only says the shape, and qkv is replaced by the result.
struct AppendArgs {
  float* qkv = nullptr;  // [n][(heads + 2 kv_heads) * dim]
  int64_t n = 0;
  int heads = 0;
  const float* bias = nullptr;  // [(heads + 2 kv_heads) * dim]; nullptr: none
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  float eps = 0.0f;
  const float* angles = nullptr;  // of rope_angles()
  CardRope rope;
  const int64_t* first = nullptr;  // on the card
  half_t* q = nullptr;             // [n][heads][dim]
  CardKv kv;
  const CardKv* work = nullptr;
  // With a store, one row: it goes there, and to kv's block slot_of[kv_head][position / block] where that is not
  // negative.
  BlockStore store;
  const int32_t* slot_of = nullptr;
};
Status append_rows(const AppendArgs& a, CardStreamHandle stream);

// Rows that one decoded token attends, in tiles of at most 16 neighbouring rows of one block of 16; no row twice.
struct TileList {
  const int32_t* tiles = nullptr;  // [kv_heads][stride][2]: first row, rows
  const int32_t* count = nullptr;  // [kv_heads]
  int64_t stride = 0;
  bool placed = false;              // rows are places in the cache of hot blocks, not positions
  const uint32_t* marks = nullptr;  // [kv_heads][stride]: bit i: row i of the tile is attended; nullptr: all are
};

struct AttendArgs {
  const half_t* q = nullptr;  // [n][heads][dim]
  int heads = 0;
  CardKv kv;
  float scale = 0.0f;
  float softcap = 0.0f;  // 0: none
  int64_t window = 0;    // rows that a query sees, its own included; 0: all
  // With kv.ring: where the rows that lie elsewhere end; they are left out. On the card.
  const int64_t* old_end = nullptr;
};
// One token at position *position (on the card), whose row is in kv. Work is cut into `splits` pieces of rows, each
// giving a partial (out, lse); they are merged in order. list.tiles nullptr: all rows.
struct DecodeScratch {
  int splits = 0;
  float* out = nullptr;  // [heads][pieces][dim]
  float* lse = nullptr;  // [heads][pieces]
  int first = 0;         // of these pieces among `all`, where two kernels share the rows; all 0: there is one
  int all = 0;
  LONGKV_ON_BOTH int pieces() const { return all > 0 ? all : splits; }
  LONGKV_ON_BOTH int64_t at(int head, int split) const { return int64_t(head) * pieces() + first + split; }
  static int64_t bytes(int heads, int pieces, int dim) { return int64_t(heads) * pieces * (dim + 1) * 4; }
};
Status attend_token(const AttendArgs& a, const TileList& list, const int64_t* position, const DecodeScratch& scratch,
                    CardStreamHandle stream);
// Partials to the attention's output, as floats and integers: [heads * dim].
Status merge_partials(const DecodeScratch& scratch, int heads, int dim, const CardRow& out, CardStreamHandle stream);

// Causal attention of n prompt tokens from position `first` on, whose rows are in kv (f16 or bf16):
// out[n][heads * dim] halves.
Status attend_prompt(const AttendArgs& a, int64_t first, int64_t n, half_t* out, CardStreamHandle stream);

// Rows [0, n) with seeded, normally distributed values.
Status fill_rows(const CardKv& kv, int64_t n, uint64_t seed, CardStreamHandle stream);
// Rows [first, first + n) of kv as they read back, to the same rows of work (f16).
Status decode_rows(const CardKv& kv, int64_t first, int64_t n, const CardKv& work, CardStreamHandle stream);

}  // namespace longkv::card
