// The KV cache as saved and restored.
#include <algorithm>
#include <limits>

#include "base/error.h"
#include "kv/cache.h"
#include "kv/layout.h"

namespace longkv {

void KvCache::visit(KvState& state) {
  if (!state.loading() &&
      std::any_of(tokens_.begin(), tokens_.end(), [&](int64_t n) { return n != tokens_.front(); })) {
    return state.refuse(Code::kInternal, "a KV cache is saved in the middle of a prompt or a step");
  }
  state.values("tokens", std::span(tokens_));
  state.values("fixed", std::span(fixed_));
  state.values("first_row", std::span(first_row_));
  state.values("rows", std::span(rows_));
  if (!state.ok()) return;
  if (state.loading()) {
    if (!state.expect(counts_valid(), "the numbers of tokens and rows")) return;
    const int64_t most = *std::max_element(rows_.begin(), rows_.end());
    if (most > capacity_.v) {
      return state.refuse(Code::kInvalidArgument, fmt::format("{} KV rows do not fit a cache of {}; use a larger "
                                                              "context (-c)",
                                                              most, capacity_.v));
    }
  }
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int h = 0; h < shape_.kv_heads && state.ok(); ++h) {
      const KvState::Level in_layer(state, "l", layer), in_head(state, "h", h);
      visit_head(state, layer, h);
    }
  }
}

// What the counts of a file must be, whatever its recipe.
bool KvCache::counts_valid() const {
  const int64_t tokens = tokens_.front();
  if (tokens < 0 || tokens > std::numeric_limits<int32_t>::max()) return false;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    const auto l = size_t(layer);
    if (tokens_[l] != tokens || fixed_[l] < 0 || fixed_[l] > tokens || first_row_[l] < 0) return false;
    const int64_t window = shape_.window_of(layer);
    // Rows behind a window may be gone, those inside are all there.
    if (first_row_[l] > (window > 0 ? first_visible_row(tokens, window) : 0)) return false;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const int64_t rows = rows_[slot(layer, h)];
      // Without positions of their own, rows are positions.
      const bool positions = fields_.pos && window == 0;
      if (rows < 0 || rows > tokens || (!positions && rows != tokens)) return false;
      if (tokens > 0 && rows == 0) return false;
    }
  }
  return true;
}

void KvCache::visit_head(KvState& state, int layer, int kv_head) {
  const size_t s = slot(layer, kv_head);
  const int64_t rows = rows_[s];
  if (regions_) regions_->visit(state, layer, kv_head, rows);
  if (!state.ok()) return;
  // Rows in the arrays: all that were not released, or what lies around the encoded ones.
  std::vector<RowRange> held;
  const KvMiddle* middle = regions_ ? regions_->middle(layer, kv_head) : nullptr;
  if (middle != nullptr) {
    append_range(held, {0, middle->begin});
    append_range(held, {middle->end, rows});
  } else {
    append_range(held, {first_row_[size_t(layer)], rows});
  }
  const std::vector<RowRange> all{{first_row_[size_t(layer)], rows}};  // fields stay when rows are encoded
  const auto visit_array = [&](const char* name, std::vector<VirtualArray>& arrays, int64_t stride,
                               const auto& ranges) {
    if (arrays.empty()) return;
    std::vector<ByteRange> live;
    for (const RowRange& r : ranges) {
      live.push_back({uint64_t(row_offset(r.begin, stride)), uint64_t(row_offset(r.end, stride))});
    }
    state.array(name, arrays[s], live);
  };
  visit_array("k", k_, k_stride(), held);
  visit_array("v", v_, v_stride(), held);
  visit_array("pos", pos_, sizeof(int32_t), all);
  visit_array("bias", bias_, sizeof(float), all);
  visit_array("count", counts_, sizeof(uint16_t), all);
  if (!state.loading() || !state.ok()) return;
  advised_[s] = rows;  // where a file is mapped, huge pages have nothing to say
  if (!fields_.pos) return;
  const auto* pos = reinterpret_cast<const int32_t*>(pos_[s].data());
  const bool good = std::all_of(pos + first_row_[size_t(layer)], pos + rows,
                                [&](int32_t p) { return p >= 0 && int64_t(p) < tokens_[size_t(layer)]; });
  state.expect(good, "the positions of rows");
}

}  // namespace longkv
