// Prompt products with int8 activations: who decodes which rows when, and which kernel multiplies them.
//
// A task owns 32 or 64 rows and a range of tokens. It decodes its rows chunk by chunk of columns into a scratch that
// fits the first-level cache, and streams the tokens past it, then the second terms of each group. A token's result
// depends on its own values alone, in one order of additions (per chunk: groups ascending, second terms ascending), so
// neither the thread count nor the number of tokens changes a bit.
#include <algorithm>
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
// Bytes of one decoded panel: half of a small first-level cache, the rest is for activations.
constexpr int64_t kPanelBytes = 16 * 1024;
constexpr int64_t kTokenBlock = 48;     // a multiple of every level's tile; their activations stay in the second level
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
};

thread_local PanelScratch panel_scratch;
thread_local PreparedScratch prepared_scratch;

// Columns per chunk: equal chunks, multiples of the file's block, at most kPanelBytes per panel.
int64_t chunk_columns(int64_t cols, int64_t block, int bytes_per_level) {
  const int64_t limit = kPanelBytes / (kTileRows * bytes_per_level);
  const int64_t chunks = (cols + limit - 1) / limit;
  return ((cols + chunks - 1) / chunks + block - 1) / block * block;
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

// Second terms of the activations, each one group of columns of one token.
struct FineTerms {
  const QuantizedRows* x;
  const int16_t* zero;  // [terms][zero_stride]; nullptr without
  int64_t zero_stride;
  const float* sum;  // [terms][sum_stride]; nullptr without
  int64_t sum_stride;
};

// Adds second terms [first, last), all of the group at which `panel` starts, to sums[token - token0][stride].
void add_fine_terms(const Int8Level& level, const PanelType& type, const Panel& panel, const FineTerms& fine,
                    int64_t first, int64_t last, int64_t token0, float* sums, int64_t stride) {
  const QuantizedRows& x = *fine.x;
  Int8Tile tile{};
  tile.type = &type;
  tile.panel = panel;
  tile.groups = 1;
  tile.tokens = last - first;
  tile.q = x.fine_q.data() + first * kActivationGroup;
  tile.q_stride = kActivationGroup;
  tile.x_scale = x.fine_scale.data() + first;
  tile.x_scale_stride = 1;
  tile.x_sum = fine.sum == nullptr ? nullptr : fine.sum + first * fine.sum_stride;
  tile.x_sum_stride = fine.sum_stride;
  tile.x_zero = fine.zero == nullptr ? nullptr : fine.zero + first * fine.zero_stride;
  tile.x_zero_stride = fine.zero_stride;
  tile.x_sum16 = x.fine_sum16.data() + 2 * first;
  tile.x_sum16_stride = 2;
  tile.y = sums;
  tile.y_stride = stride;
  tile.y_rows = x.fine_token.data() + first;  // a token has one second term a group, so no row comes twice
  tile.first_row = token0;
  tile.accumulate = true;
  level.multiply(tile);
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
  const PanelType& type = *panel_type(w.type);
  const Int8Level& level = active_int8_level();
  const int64_t tokens = x.tokens, cols = x.cols, groups = cols / 32;
  const bool widened = type.form == PanelForm::kByte && level.wide;
  const bool zeroed = type.zero != 0 && level.zero_terms != nullptr;
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
          level.zero_terms(x.q.data() + t * cols, cols, zero_group, type.zero, zero + t * zero_stride);
        }
        if (sum != nullptr) {
          write_sums(x.scale.data() + t * groups, x.sum16.data() + t * 2 * groups, groups, type.offset_group,
                     sum + t * sum_stride);
        }
      }
      for (int64_t e = terms * task / tasks; e < terms * (task + 1) / tasks; ++e) {
        if (zero != nullptr) {
          level.zero_terms(x.fine_q.data() + e * kActivationGroup, kActivationGroup, zero_group, type.zero,
                           fine_zero + e * fine_zero_stride);
        }
        if (sum != nullptr) {
          write_sums(x.fine_scale.data() + e, x.fine_sum16.data() + 2 * e, 1, type.offset_group,
                     fine_sum + e * fine_sum_stride);
        }
      }
    });
  }
  const FineTerms fine{&x, fine_zero, fine_zero_stride, fine_sum, fine_sum_stride};

  const int task_panels = w.rows >= kManyRows ? kMaxTaskPanels : kMinTaskPanels;
  const int64_t task_rows = task_panels * kTileRows;
  const int64_t row_tasks = (w.rows + task_rows - 1) / task_rows;
  // Few rows on many threads: split the tokens too. Results do not depend on the split.
  const int64_t wanted = (3 * pool.threads() + row_tasks - 1) / row_tasks;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, tokens / kMinTokenRange));
  const int64_t token_range = ((tokens + parts - 1) / parts + kTokenBlock - 1) / kTokenBlock * kTokenBlock;
  const int64_t token_tasks = (tokens + token_range - 1) / token_range;
  const int64_t chunk = chunk_columns(cols, type.block, widened ? 2 : 1);

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
        // Sums of a block of tokens, side by side: rows of y lie far apart, and at powers of two they share few sets of
        // the caches.
        float* sums = scratch.sums.get(kTokenBlock * kMaxTaskPanels * kTileRows);
        const int64_t valid = std::min(task_rows, w.rows - row0);
        if (col > 0) {
          for (int64_t i = 0; i < block; ++i) std::copy_n(y + (t + i) * y_stride + row0, valid, sums + i * task_rows);
        }
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
        tile.y_stride = task_rows;
        tile.accumulate = col > 0;
        for (int p = 0; p < task_panels && panel_rows[p] > 0; ++p) {
          tile.panel = panels[p];
          tile.y = sums + p * kTileRows;
          level.multiply(tile);
        }
        for (int64_t g = 0; g < chunk_groups && terms > 0; ++g) {
          const auto [first, last] = x.fine_range(col / 32 + g, t, t + block);
          if (first == last) continue;
          for (int p = 0; p < task_panels && panel_rows[p] > 0; ++p) {
            Panel panel = panels[p];
            panel.levels += g * 32 * kTileRows;
            panel.scale += g * kTileRows;
            panel.offset += g * fine_sum_stride * kTileRows;
            panel.scale16 += g * 2 * 2 * kTileRows;
            add_fine_terms(level, type, panel, fine, first, last, t, sums + p * kTileRows, task_rows);
          }
        }
        for (int64_t i = 0; i < block; ++i) std::copy_n(sums + i * task_rows, valid, y + (t + i) * y_stride + row0);
      }
    }
  });
}

}  // namespace longkv
