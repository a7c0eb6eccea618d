// Rows of a head that lies in regions (KvHeadView::middle), cut at their borders.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/types.h"

namespace longkv {

// A view of the middle alone, its rows counted from 0. dim_k is that of the kept channels.
KvHeadView middle_view(const KvHeadView& head);

// The parts of ascending ranges outside the middle, appended to `outside`, and inside, counted from the middle's first
// row, appended to `inside`.
void split_ranges(const KvMiddle& middle, std::span<const RowRange> ranges, std::vector<RowRange>& outside,
                  std::vector<RowRange>& inside);

// What a query meets rows of the middle with: dst[dim_k of the middle], kept channels times alpha, or products with
// directions. q: [dim], channels of a row.
void gather_query(const KvMiddle& middle, const float* q, int64_t dim, float* dst);

}  // namespace longkv
