// Shapes and element types of the KV cache, and the counters that must never be mixed.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace longkv {

// How one K or V row is encoded. Names as in llama.cpp's -ctk and -ctv.
enum class KvType { kF32, kF16, kBf16, kQ8_0, kQ4_0, kFp8, kKivi2, kKivi4 };

// Channels that share one scale in q8_0 and q4_0 rows.
inline constexpr int64_t kKvQuantGroup = 32;
inline bool kv_type_quantized(KvType type) { return type == KvType::kQ8_0 || type == KvType::kQ4_0; }

struct KvTypes {
  KvType k = KvType::kF16;
  KvType v = KvType::kF16;
  bool operator==(const KvTypes&) const = default;
};

const char* kv_type_name(KvType type);
std::optional<KvType> parse_kv_type(std::string_view name);
// Types that encode whole blocks of 32 rows (kv/codec/kivi.h): only old rows can have them.
inline bool kv_type_blocked(KvType type) { return type == KvType::kKivi2 || type == KvType::kKivi4; }
// Types whose rows carry their own scale, so that a row can hold any finite magnitude.
inline bool kv_type_scaled(KvType type) { return kv_type_quantized(type) || type == KvType::kFp8; }
// Bytes of a row of `dim` channels (a multiple of 32 for q8_0 and q4_0); of a blocked type, a row's share of its block.
int64_t kv_row_bytes(KvType type, int64_t dim);

template <class Tag>
struct Count {
  int64_t v = 0;
  auto operator<=>(const Count&) const = default;
};
using TokenCount = Count<struct TokenTag>;      // tokens seen by a sequence; the next token's position
using RowCount = Count<struct RowTag>;          // rows kept; equals tokens seen until something is evicted or merged
using RowCapacity = Count<struct CapacityTag>;  // rows that address space is reserved for

// Rows [begin, end) of one KV head.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const RowRange&) const = default;
};

// What the cache must know of a model; it knows nothing else of it.
struct KvShape {
  int layers = 0;
  int kv_heads = 0;
  int group_size = 0;  // query heads per KV head
  int dim_k = 0;       // channels of a K row
  int dim_v = 0;
  std::vector<int64_t> window;  // per layer: tokens a query sees, its own included; 0 = all. Empty = all layers 0

  int64_t window_of(int layer) const { return window.empty() ? 0 : window[size_t(layer)]; }
};

// Rows [begin, end) of a head that are held in another form than the rest (kv/region_store.h): older rows with fewer
// bits or fewer channels, between first rows and recent ones that are held as they came.
struct KvMiddle {
  int64_t begin = 0;
  int64_t end = 0;
  KvType k_type = KvType::kF16;
  KvType v_type = KvType::kF16;
  int dim_k = 0;  // numbers kept of a K row; 0: of these rows only means are left
  int dim_v = 0;
  const uint8_t* k = nullptr;  // row `begin` first; blocked types: its block
  const uint8_t* v = nullptr;
  int64_t k_stride = 0;  // bytes of a row, of a block of 32 rows for blocked types
  int64_t v_stride = 0;
  const uint16_t* channels = nullptr;  // [dim_k], ascending; nullptr: all
  const float* alpha = nullptr;        // [dim_k], multiplies K (folded into queries); nullptr: 1
  // [channels of a row][dim_k]: K holds no channels but products of rows; queries meet them through these instead.
  const float* directions = nullptr;
  // [channels of a row], what all keys of the middle lack on average, added to each; nullptr: nothing.
  const float* mean_k = nullptr;
  // dim_k == 0. Nullptr: the rows count for nothing; else [dim_v], and their keys are mean_k, their scores `score`
  // more.
  const float* mean_v = nullptr;
  float score = 0.0f;
};

// The stored rows of one KV head in one layer. K rows carry RoPE at their token's position, which is the row's index
// until rows are evicted or merged.
struct KvHeadView {
  KvType k_type = KvType::kF16;
  KvType v_type = KvType::kF16;
  int dim_k = 0;
  int dim_v = 0;
  const uint8_t* k = nullptr;  // row r at k + r * k_stride
  const uint8_t* v = nullptr;
  int64_t k_stride = 0;  // bytes
  int64_t v_stride = 0;
  int64_t first_row = 0;  // rows below were released (sliding windows)
  int64_t rows = 0;       // rows end here

  // Optional, row r at [r]. They exist only under recipes that evict or merge.
  const float* bias = nullptr;       // added to the logit: a merged row stands for more than one token
  const int32_t* pos = nullptr;      // token position whose RoPE the K row carries
  const uint16_t* count = nullptr;   // tokens that the row stands for
  const KvMiddle* middle = nullptr;  // where rows [begin, end) of it are instead of in k and v
};

}  // namespace longkv
