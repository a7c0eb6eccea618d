// The two-level index: how many fine blocks a coarse one covers, and what summary it carries.
//
// Rule: scoring a KV head may read as many index bytes as attending `budget` rows of it reads; 8-bit summaries may read
// as many blocks as halves would, at half of the bytes. A flat scan within that limit needs no second level. Beyond it,
// coarse blocks are scored first and the best are refined with what is left of the limit, but never with less than
// kRefineBudgets times the blocks that the budget holds. Kinds that read every token have one level unless the recipe
// says otherwise: boxes above them hide what single tokens show, and key-value pairs that a flat scan finds are lost
// (docs/results.md).
#pragma once

#include <cstdint>

#include "kv/recipe.h"
#include "kv/types.h"

namespace longkv {

constexpr int64_t kRefineBudgets = 4;

// The bytes that scoring a KV head may read, whose attention reads attention_bytes.
int64_t index_limit(const IndexSpec& spec, const KvShape& shape, int64_t attention_bytes);

// Fine blocks per coarse block for an index of `capacity_rows`: spec.coarse if it is set; 1 when a flat scan fits and
// for kinds that read every token; else the smallest power of two whose coarse scan takes at most half of the limit at
// full capacity.
int64_t choose_coarse_factor(const IndexSpec& spec, const KvShape& shape, int64_t capacity_rows, int64_t limit);

// Coarse blocks carry the same kind of summary; kinds that read every token get boxes.
IndexSpec coarse_spec(const IndexSpec& spec, int64_t factor);

// Bytes that scoring one block (a cluster, for clusters) of one KV head reads, about.
int64_t summary_bytes(const IndexSpec& spec, const KvShape& shape);
// Bytes that the index of one KV head holds for n rows, about.
int64_t summary_bytes_held(const IndexSpec& spec, const KvShape& shape, int64_t rows);
// 4-bit keys of refine=int4.
IndexSpec four_bit_spec();

}  // namespace longkv
