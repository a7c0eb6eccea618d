// Prompt products with int8 activations: who decodes which rows when, and which kernel multiplies them.
//
// A task owns 32 or 64 rows and a range of tokens. It decodes its rows chunk by chunk of columns into a scratch that
// fits a cache (Int8Level::panel_bytes), and streams the tokens past it, then the second terms of each group. A token's
// result depends on its own values alone, in one order of additions (per chunk: groups ascending, second terms
// ascending), so neither the thread count nor the number of tokens changes a bit.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "ops/matmul.h"
#include "ops/matmul_tile.h"

namespace longkv {

namespace {

// Panels of 16 rows per task. Wide tasks write longer runs of y, whose rows are far apart (measured: 10 to 17% faster
// from 1536 rows on); narrow ones leave enough tasks to balance small matrices.
constexpr int kMaxTaskPanels = 4;
constexpr int kMinTaskPanels = 2;
constexpr int64_t kManyRows = 1024;
constexpr int64_t kTokenBlock = 96;     // a multiple of every level's tile; their activations stay in the second level
constexpr int64_t kMinTokenRange = 64;  // below that, decoding the same rows again costs more than idle threads

// Grows only; contents are overwritten by every call.
template <class T>
class ScratchArray {
 public:
  T* get(int64_t n) {
    if (n > size_) {
      data_.resize(size_t(n) + kAlign / sizeof(T));
      size_ = n;
    }
    const auto over = reinterpret_cast<uintptr_t>(data_.data()) % kAlign;
    return data_.data() + (over == 0 ? 0 : (kAlign - over) / sizeof(T));
  }

 private:
  static constexpr size_t kAlign = 64;
  std::vector<T> data_;
  int64_t size_ = 0;
};

struct PanelScratch {
  ScratchArray<uint8_t> levels;
  ScratchArray<float> scale, offset;
  ScratchArray<int16_t> scale16;
  ScratchArray<float> sums;
};

// Forms of the activations that depend on the weight type, made once per product before the tasks start.
struct PreparedScratch {
  ScratchArray<int16_t> q16, zero, fine_zero;
  ScratchArray<float> wide_scale, sum, fine_sum;
  ScratchArray<int32_t> fine_at;
};

thread_local PanelScratch panel_scratch;
thread_local PreparedScratch prepared_scratch;

// Columns per chunk: equal chunks, multiples of the file's block, at most `panel_bytes` per panel.
int64_t chunk_columns(int64_t cols, int64_t block, int64_t panel_bytes, int bytes_per_level) {
  const int64_t limit = panel_bytes / (kTileRows * bytes_per_level);
  const int64_t chunks = (cols + limit - 1) / limit;
  return ((cols + chunks - 1) / chunks + block - 1) / block * block;
}

void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t n, int64_t width) {
  for (int64_t i = 0; i < n; ++i, from += from_stride, to += to_stride) {
    int64_t c = 0;
    for (; c + kTileRows <= width; c += kTileRows) std::memcpy(to + c, from + c, kTileRows * sizeof(float));
    std::copy_n(from + c, width - c, to + c);
  }
}

// scale * sum(q) for groups of 16 or 32.
void write_sums(const float* scale, const int16_t* sum16, int64_t groups, int group, float* out) {
  for (int64_t g = 0; g < groups; ++g) {
    if (group == 32) {
      out[g] = scale[g] * float(sum16[2 * g] + sum16[2 * g + 1]);
    } else {
      out[2 * g] = scale[g] * float(sum16[2 * g]);
      out[2 * g + 1] = scale[g] * float(sum16[2 * g + 1]);
    }
  }
}

// at[b][g]: the first term of group g that belongs to block b of kTokenBlock tokens or a later one.
void find_fine_terms(const QuantizedRows& x, int32_t* at) {
  const int64_t groups = x.cols / 32, blocks = ceil_div(x.tokens, kTokenBlock);
  for (int64_t g = 0; g < groups; ++g) {
    int32_t term = x.fine_first[size_t(g)];
    for (int64_t b = 0; b < blocks; ++b) {
      at[b * groups + g] = term;
      while (term < x.fine_first[size_t(g + 1)] && x.fine_token[size_t(term)] < (b + 1) * kTokenBlock) ++term;
    }
    at[blocks * groups + g] = term;
  }
}

// Adds the second terms of one group after the other to what `tile` has summed.
void add_fine_terms(const Int8Level& level, const Int8Tile& tile, const FineTerms& fine) {
  if (level.add_terms != nullptr) return level.add_terms(tile, fine);
  for (int64_t g = 0; g < tile.groups; ++g) {
    const int64_t first = fine.first[g];
    Int8Tile one = tile;
    one.tokens = fine.last[g] - first;
    if (one.tokens == 0) continue;
    one.panel = tile.panel.from_group(g, *tile.type);
    one.groups = 1;
    one.q = fine.q + first * kActivationGroup;
    one.q_stride = kActivationGroup;
    one.x_scale = fine.x_scale + first;
    one.x_scale_stride = 1;
    one.x_sum = fine.x_sum == nullptr ? nullptr : fine.x_sum + first * fine.x_sum_stride;
    one.x_sum_stride = fine.x_sum_stride;
    one.x_zero = fine.x_zero == nullptr ? nullptr : fine.x_zero + first * fine.x_zero_stride;
    one.x_zero_stride = fine.x_zero_stride;
    one.x_sum16 = fine.x_sum16 + 2 * first;
    one.x_sum16_stride = 2;
    one.y_rows = fine.token + first;  // a token has one second term a group, so no row comes twice
    one.first_row = fine.token0;
    one.accumulate = true;
    level.multiply(one);
  }
}

}  // namespace

const Int8Level& active_int8_level() {
  const IsaLevel isa = active_isa();
#if defined(__x86_64__)
  if (isa >= IsaLevel::kAmx) return int8_level_amx();
  if (isa >= IsaLevel::kAvx512Vnni) return int8_level_avx512vnni();
  if (isa >= IsaLevel::kAvx2) return int8_level_avx2();
#elif defined(__aarch64__)
  if (isa >= IsaLevel::kNeonDot) return int8_level_neondot();
#endif
  (void)isa;
  return int8_level_base();
}

void matmul_int8(const Weight& w, const QuantizedRows& x, float* y, int64_t y_stride, ThreadPool& pool) {
  const Int8Level& level = active_int8_level();
  const PanelType& type = *(level.own_type != nullptr ? level.own_type(w.type) : panel_type(w.type));
  const int64_t tokens = x.tokens, cols = x.cols, groups = cols / 32;
  const bool widened = type.form == PanelForm::kByte && level.wide;
  const int level_zero = type.form == PanelForm::kByte ? level.byte_zero : type.zero;
  const bool zeroed = level_zero != 0 && level.zero_terms != nullptr;
  const int zero_group = type.form == PanelForm::kGroup16 ? 16 : 32;

  PreparedScratch& prepared = prepared_scratch;
  const int64_t zero_stride = 2 * cols / zero_group, fine_zero_stride = 2 * 32 / zero_group;
  const int64_t sum_stride = type.offset_group == 0 ? 0 : cols / type.offset_group;
  const int64_t fine_sum_stride = type.offset_group == 0 ? 0 : 32 / type.offset_group;
  const int64_t terms = widened ? 0 : x.fine_first[size_t(groups)];
  int16_t* q16 = widened ? prepared.q16.get(tokens * cols) : nullptr;
  float* wide_scale = widened ? prepared.wide_scale.get(tokens * groups) : nullptr;
  int16_t* zero = zeroed ? prepared.zero.get(tokens * zero_stride) : nullptr;
  int16_t* fine_zero = zeroed ? prepared.fine_zero.get(terms * fine_zero_stride) : nullptr;
  float* sum = sum_stride > 0 ? prepared.sum.get(tokens * sum_stride) : nullptr;
  float* fine_sum = sum_stride > 0 ? prepared.fine_sum.get(terms * fine_sum_stride) : nullptr;
  if (q16 != nullptr || zero != nullptr || sum != nullptr) {
    constexpr int64_t kPrepareTokens = 16;
    const int64_t tasks = ceil_div(tokens, kPrepareTokens);
    pool.run(tasks, [&](int64_t task, int) {
      for (int64_t t = task * kPrepareTokens; t < std::min(tokens, (task + 1) * kPrepareTokens); ++t) {
        if (q16 != nullptr) x.widen(t, q16 + t * cols, wide_scale + t * groups);
        if (zero != nullptr) {
          level.zero_terms(x.q.data() + t * cols, x.sum16.data() + t * 2 * groups, cols, zero_group, level_zero,
                           zero + t * zero_stride);
        }
        if (sum != nullptr) {
          write_sums(x.scale.data() + t * groups, x.sum16.data() + t * 2 * groups, groups, type.offset_group,
                     sum + t * sum_stride);
        }
      }
      for (int64_t e = terms * task / tasks; e < terms * (task + 1) / tasks; ++e) {
        if (zero != nullptr) {
          level.zero_terms(x.fine_q.data() + e * kActivationGroup, x.fine_sum16.data() + 2 * e, kActivationGroup,
                           zero_group, level_zero, fine_zero + e * fine_zero_stride);
        }
        if (sum != nullptr) {
          write_sums(x.fine_scale.data() + e, x.fine_sum16.data() + 2 * e, 1, type.offset_group,
                     fine_sum + e * fine_sum_stride);
        }
      }
    });
  }
  int32_t* fine_at = terms > 0 ? prepared.fine_at.get((ceil_div(tokens, kTokenBlock) + 1) * groups) : nullptr;
  if (terms > 0) find_fine_terms(x, fine_at);

  const int task_panels = w.rows >= kManyRows ? kMaxTaskPanels : kMinTaskPanels;
  const int64_t task_rows = task_panels * kTileRows;
  const int64_t row_tasks = (w.rows + task_rows - 1) / task_rows;
  // Few rows on many threads: split the tokens too. Results do not depend on the split.
  const int64_t wanted = (3 * pool.threads() + row_tasks - 1) / row_tasks;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, tokens / kMinTokenRange));
  const int64_t token_range = ((tokens + parts - 1) / parts + kTokenBlock - 1) / kTokenBlock * kTokenBlock;
  const int64_t token_tasks = (tokens + token_range - 1) / token_range;
  const int64_t chunk = chunk_columns(cols, type.block, level.panel_bytes, widened ? 2 : 1);

  pool.run(row_tasks * token_tasks, [&](int64_t task, int) {
    const int64_t row0 = task / token_tasks * task_rows;
    const int64_t token0 = task % token_tasks * token_range, token1 = std::min(tokens, token0 + token_range);
    PanelScratch& scratch = panel_scratch;
    for (int64_t col = 0; col < cols; col += chunk) {
      const int64_t columns = std::min(chunk, cols - col);
      Panel panels[kMaxTaskPanels];
      int panel_rows[kMaxTaskPanels];
      for (int p = 0; p < task_panels; ++p) {
        const int64_t row = row0 + p * kTileRows;
        panel_rows[p] = int(std::clamp<int64_t>(w.rows - row, 0, kTileRows));
        panels[p].levels = scratch.levels.get(kMaxTaskPanels * chunk * kTileRows * 2) + p * chunk * kTileRows * 2;
        panels[p].scale = scratch.scale.get(kMaxTaskPanels * chunk / 32 * kTileRows) + p * chunk / 32 * kTileRows;
        panels[p].offset = scratch.offset.get(kMaxTaskPanels * chunk / 16 * kTileRows) + p * chunk / 16 * kTileRows;
        panels[p].scale16 = scratch.scale16.get(kMaxTaskPanels * chunk / 8 * kTileRows) + p * chunk / 8 * kTileRows;
        if (panel_rows[p] > 0) level.decode(w, row, panel_rows[p], col, columns, panels[p]);
      }
      const int64_t chunk_groups = columns / 32;
      for (int64_t t = token0; t < token1; t += kTokenBlock) {
        const int64_t block = std::min(kTokenBlock, token1 - t);
        const int64_t valid = std::min(task_rows, w.rows - row0);
        // Whole panels add to y where it lies. Rows that end inside a panel have their sums side by side.
        const bool aside = valid < task_rows;
        float* out = y + t * y_stride + row0;
        float* sums = aside ? scratch.sums.get(kTokenBlock * kMaxTaskPanels * kTileRows) : out;
        const int64_t sums_stride = aside ? task_rows : y_stride;
        if (aside && col > 0) copy_rows(out, y_stride, sums, task_rows, block, valid);
        Int8Tile tile{};
        tile.type = &type;
        tile.groups = chunk_groups;
        tile.tokens = block;
        tile.q = x.q.data() + t * cols + col;
        tile.q16 = q16 == nullptr ? nullptr : q16 + t * cols + col;
        tile.q_stride = cols;
        tile.x_scale = (widened ? wide_scale : x.scale.data()) + t * groups + col / 32;
        tile.x_scale_stride = groups;
        tile.x_sum = sum == nullptr ? nullptr : sum + t * sum_stride + col / type.offset_group;
        tile.x_sum_stride = sum_stride;
        tile.x_zero = zero == nullptr ? nullptr : zero + t * zero_stride + 2 * col / zero_group;
        tile.x_zero_stride = zero_stride;
        tile.x_sum16 = x.sum16.data() + t * 2 * groups + col / 16;
        tile.x_sum16_stride = 2 * groups;
        tile.y_stride = sums_stride;
        tile.accumulate = col > 0;
        for (int p = 0; p < task_panels && panel_rows[p] > 0; p += level.panels) {
          const bool two = level.panels == 2 && panel_rows[p + 1] > 0;
          tile.panel = panels[p];
          tile.second = two ? panels[p + 1] : Panel{};
          tile.y = sums + p * kTileRows;
          level.multiply(tile);
          if (terms == 0) continue;
          const int32_t* first = fine_at + t / kTokenBlock * groups + col / 32;
          add_fine_terms(level, tile,
                         {first, first + groups, x.fine_token.data(), t, x.fine_q.data(), x.fine_scale.data(), fine_sum,
                          fine_sum_stride, fine_zero, fine_zero_stride, x.fine_sum16.data()});
        }
        if (aside) copy_rows(sums, task_rows, out, y_stride, block, valid);
      }
    }
  });
}

}  // namespace longkv
