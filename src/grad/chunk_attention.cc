#include "grad/chunk_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "base/gemm.h"
#include "kv/attend_kernel.h"
#include "kv/layout.h"

namespace longkv {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kTile = 64;         // rows that meet all queries of a head together
constexpr int64_t kPieceRows = 2048;  // rows of a task; the split does not depend on the thread count

// Rows of one KV head that one task takes: of the prompt, or the chunk itself.
struct Piece {
  int head;
  bool chunk;
  bool old;
  int64_t begin, end;
};

std::vector<Piece> pieces_of(const ChunkAttention& a) {
  std::vector<Piece> pieces;
  for (int h = 0; h < a.kv_heads; ++h) {
    const KvHeadView& prompt = a.prompt[size_t(h)];
    const int64_t first = std::max(prompt.first_row, first_visible_row(prompt.rows, a.window));
    const auto add = [&](int64_t begin, int64_t end, bool old) {
      for (int64_t r = std::max(begin, first); r < end; r += kPieceRows) {
        pieces.push_back({h, false, old, r, std::min(end, r + kPieceRows)});
      }
    };
    const RowRange middle = count_of(a.middle) > 0 ? a.middle : RowRange{prompt.rows, prompt.rows};
    add(0, middle.begin, false);
    const bool dropped = !a.heads.empty() && a.heads[size_t(h)].removed && a.heads[size_t(h)].as == RemovedAs::kDrop;
    if (!a.without_middle && !dropped) add(middle.begin, middle.end, true);
    add(middle.end, prompt.rows, false);
    pieces.push_back({h, true, false, 0, a.tokens});
  }
  return pieces;
}

// Queries of one KV head, [tokens * group][dim_k], scaled; for old rows as they meet the keys, and what is added to
// every score.
struct HeadQueries {
  std::vector<float> full, old, shift;
  std::vector<float> mean;  // [dim_k], of old keys; empty: stands for nothing
};

const OldHead* removed_head(const ChunkAttention& a, int head) {
  return a.heads.empty() || !a.heads[size_t(head)].removed ? nullptr : &a.heads[size_t(head)];
}

HeadQueries gather_queries(const ChunkAttention& a, int head) {
  HeadQueries out;
  const int64_t n = a.tokens * a.group;
  out.full.resize(size_t(n * a.dim_k));
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float* q = a.q + (t * a.kv_heads + head) * a.group * a.dim_k;
    for (int64_t i = 0; i < a.group * a.dim_k; ++i) out.full[size_t(t * a.group * a.dim_k + i)] = a.scale * q[i];
  }
  out.shift.assign(size_t(n), 0.0f);
  if (count_of(a.middle) <= 0 || a.without_middle) return out;
  const OldHead* removed = removed_head(a, head);
  if (removed == nullptr && a.mix == nullptr) {
    out.old = out.full;
    return out;
  }
  out.old.assign(out.full.size(), 0.0f);
  if (removed == nullptr) {
    gemm_add(n, a.dim_k, a.dim_k, out.full.data(), a.dim_k, a.mix + int64_t(head) * a.dim_k * a.dim_k, a.dim_k,
             out.old.data(), a.dim_k);
  } else if (removed->as == RemovedAs::kConstant) {
    std::fill(out.shift.begin(), out.shift.end(), removed->score);
  }
  if (removed == nullptr ? a.compensate : removed->as == RemovedAs::kMean) {
    out.mean = mean_of_old_keys(a, head);
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < a.dim_k; ++c) {
        const auto at = size_t(i * a.dim_k + c);
        sum += double(out.full[at] - out.old[at]) * out.mean[size_t(c)];
      }
      out.shift[size_t(i)] = float(sum);
    }
  }
  return out;
}

// K and V rows of a piece: row r at k + r * k_stride, strides in values.
struct Rows {
  const float *k, *v;
  int64_t k_stride, v_stride;
};

Rows rows_of_piece(const ChunkAttention& a, const Piece& p) {
  if (p.chunk) {
    return {a.k + int64_t(p.head) * a.dim_k, a.v + int64_t(p.head) * a.dim_v, int64_t(a.kv_heads) * a.dim_k,
            int64_t(a.kv_heads) * a.dim_v};
  }
  const KvHeadView& view = a.prompt[size_t(p.head)];
  return {reinterpret_cast<const float*>(view.k), reinterpret_cast<const float*>(view.v),
          view.k_stride / int64_t(sizeof(float)), view.v_stride / int64_t(sizeof(float))};
}

// Scores of rows [row, row + rows) of a piece for all queries, [queries][kTile]; what a query does not see is -inf.
void tile_scores(const ChunkAttention& a, const Piece& p, const Rows& rows, const HeadQueries& head, int64_t row,
                 int64_t n, float* keys, float* s) {
  const int64_t n_q = a.tokens * a.group;
  const std::vector<float>& queries = p.old ? head.old : head.full;
  transpose(rows.k + row * rows.k_stride, n, a.dim_k, rows.k_stride, keys, kTile);
  for (int64_t i = 0; i < n_q; ++i) std::fill_n(s + i * kTile, n, p.old ? head.shift[size_t(i)] : 0.0f);
  if (const float* bias = p.chunk ? nullptr : a.prompt[size_t(p.head)].bias; bias != nullptr) {
    for (int64_t i = 0; i < n_q; ++i) {
      for (int64_t j = 0; j < n; ++j) s[i * kTile + j] += bias[row + j];
    }
  }
  gemm_add(n_q, n, a.dim_k, queries.data(), a.dim_k, keys, kTile, s, kTile);
  const int64_t offset = p.chunk ? a.prompt[size_t(p.head)].rows : 0;
  for (int64_t t = 0; t < a.tokens; ++t) {
    const RowRange seen = visible_rows(a.prompt[size_t(p.head)].rows + t, a.window);
    const int64_t begin = std::clamp<int64_t>(seen.begin - offset - row, 0, n);
    const int64_t end = std::clamp<int64_t>(seen.end - offset - row, begin, n);
    for (int64_t g = 0; g < a.group; ++g) {
      float* line = s + (t * a.group + g) * kTile;
      std::fill(line, line + begin, kNone);
      std::fill(line + end, line + n, kNone);
    }
  }
}

// Softmax over the rows of one piece: out [queries][dim_v] relative to the maximum, with maximum and sum.
struct Partial {
  std::vector<float> out, top, sum;
};

void attend_piece(const ChunkAttention& a, const Piece& p, const HeadQueries& queries, Partial& partial) {
  const int64_t n_q = a.tokens * a.group;
  partial.out.assign(size_t(n_q * a.dim_v), 0.0f);
  partial.top.assign(size_t(n_q), kNone);
  partial.sum.assign(size_t(n_q), 0.0f);
  const Rows rows = rows_of_piece(a, p);
  std::vector<float> s(size_t(n_q * kTile)), keys(size_t(a.dim_k * kTile));
  for (int64_t row = p.begin; row < p.end; row += kTile) {
    const int64_t n = std::min(kTile, p.end - row);
    tile_scores(a, p, rows, queries, row, n, keys.data(), s.data());
    for (int64_t i = 0; i < n_q; ++i) {
      float* line = s.data() + i * kTile;
      const float top = std::max(partial.top[size_t(i)], *std::max_element(line, line + n));
      if (top == kNone) {  // nothing seen yet
        std::fill_n(line, n, 0.0f);
        continue;
      }
      const float keep = std::exp(partial.top[size_t(i)] - top);
      for (int64_t j = 0; j < n; ++j) line[j] -= top;
      exp_nonpositive(line, line, n);
      float sum = partial.sum[size_t(i)] * keep;
      for (int64_t j = 0; j < n; ++j) sum += line[j];
      partial.sum[size_t(i)] = sum;
      partial.top[size_t(i)] = top;
      if (keep != 1.0f) {
        float* out = partial.out.data() + i * a.dim_v;
        for (int64_t c = 0; c < a.dim_v; ++c) out[c] *= keep;
      }
    }
    gemm_add(n_q, a.dim_v, n, s.data(), kTile, rows.v + row * rows.v_stride, rows.v_stride, partial.out.data(),
             a.dim_v);
  }
}

// Gradients of one piece. r: [queries][dim_k], sum over rows of w k with w = dL/ds, and w: that of w; dk and dv of the
// chunk's own rows.
struct PieceGradient {
  std::vector<float> r, w, dk, dv;
};

void backward_piece(const ChunkAttention& a, const Piece& p, const HeadQueries& queries, const float* lse,
                    const float* delta, const std::vector<float>& u, float* dprompt, PieceGradient& out) {
  const int64_t n_q = a.tokens * a.group;
  out.r.assign(size_t(n_q * a.dim_k), 0.0f);
  out.w.assign(size_t(n_q), 0.0f);
  if (p.chunk) {
    out.dk.assign(size_t(a.tokens * a.dim_k), 0.0f);
    out.dv.assign(size_t(a.tokens * a.dim_v), 0.0f);
  }
  const Rows rows = rows_of_piece(a, p);
  std::vector<float> s(size_t(n_q * kTile)), d(size_t(n_q * kTile)), flipped(size_t(n_q * kTile));
  std::vector<float> keys(size_t(a.dim_k * kTile)), values(size_t(a.dim_v * kTile));
  for (int64_t row = p.begin; row < p.end; row += kTile) {
    const int64_t n = std::min(kTile, p.end - row);
    tile_scores(a, p, rows, queries, row, n, keys.data(), s.data());
    transpose(rows.v + row * rows.v_stride, n, a.dim_v, rows.v_stride, values.data(), kTile);
    for (int64_t i = 0; i < n_q; ++i) {
      float* line = s.data() + i * kTile;
      // A score may exceed the log of all sums by the roundings of that sum.
      for (int64_t j = 0; j < n; ++j) line[j] = std::min(line[j] - lse[i], 0.0f);
      exp_nonpositive(line, line, n);
      std::fill_n(d.data() + i * kTile, n, 0.0f);
    }
    gemm_add(n_q, n, a.dim_v, u.data(), a.dim_v, values.data(), kTile, d.data(), kTile);
    if (p.chunk) {
      transpose(s.data(), n_q, n, kTile, flipped.data(), n_q);
      gemm_add(n, a.dim_v, n_q, flipped.data(), n_q, u.data(), a.dim_v, out.dv.data() + row * a.dim_v, a.dim_v);
    }
    for (int64_t i = 0; i < n_q; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        float& w = s[size_t(i * kTile + j)];
        w *= d[size_t(i * kTile + j)] - delta[i];
        out.w[size_t(i)] += w;
      }
    }
    gemm_add(n_q, a.dim_k, n, s.data(), kTile, rows.k + row * rows.k_stride, rows.k_stride, out.r.data(), a.dim_k);
    float* dk = p.chunk ? out.dk.data() : dprompt;
    if (dk == nullptr) continue;
    transpose(s.data(), n_q, n, kTile, flipped.data(), n_q);
    gemm_add(n, a.dim_k, n_q, flipped.data(), n_q, queries.full.data(), a.dim_k, dk + row * a.dim_k, a.dim_k);
  }
}

// Rows of queries of one head, from [tokens][query heads][width].
std::vector<float> gather(const ChunkAttention& a, const float* x, int head, int width) {
  std::vector<float> out(size_t(a.tokens * a.group * width));
  for (int64_t t = 0; t < a.tokens; ++t) {
    std::copy_n(x + (t * a.kv_heads + head) * a.group * width, int64_t(a.group) * width,
                out.data() + t * a.group * width);
  }
  return out;
}

}  // namespace

std::vector<float> mean_of_old_keys(const ChunkAttention& a, int head) {
  std::vector<double> sum(size_t(a.dim_k), 0.0);
  const KvHeadView& view = a.prompt[size_t(head)];
  for (int64_t r = a.middle.begin; r < a.middle.end; ++r) {
    const float* k = reinterpret_cast<const float*>(view.k + r * view.k_stride);
    for (int64_t c = 0; c < a.dim_k; ++c) sum[size_t(c)] += k[c];
  }
  std::vector<float> mean;
  for (double x : sum) mean.push_back(float(x / double(count_of(a.middle))));
  return mean;
}

void attend_chunk(const ChunkAttention& a, float* out, float* lse, ThreadPool& pool) {
  const std::vector<Piece> pieces = pieces_of(a);
  std::vector<HeadQueries> queries(size_t(a.kv_heads));
  pool.run(a.kv_heads, [&](int64_t h, int) { queries[size_t(h)] = gather_queries(a, int(h)); });
  std::vector<Partial> partials(pieces.size());
  pool.run(int64_t(pieces.size()), [&](int64_t i, int) {
    const Piece& p = pieces[size_t(i)];
    attend_piece(a, p, queries[size_t(p.head)], partials[size_t(i)]);
  });
  pool.run(a.tokens, [&](int64_t t, int) {
    for (int h = 0; h < a.kv_heads; ++h) {
      for (int g = 0; g < a.group; ++g) {
        const int64_t i = t * a.group + g, at = (t * a.kv_heads + h) * a.group + g;
        float top = kNone;
        for (size_t p = 0; p < pieces.size(); ++p) {
          if (pieces[p].head == h) top = std::max(top, partials[p].top[size_t(i)]);
        }
        float* o = out + at * a.dim_v;
        std::fill_n(o, a.dim_v, 0.0f);
        float sum = 0.0f;
        for (size_t p = 0; p < pieces.size(); ++p) {
          if (pieces[p].head != h || partials[p].top[size_t(i)] == kNone) continue;
          const float weight = std::exp(partials[p].top[size_t(i)] - top);
          sum += weight * partials[p].sum[size_t(i)];
          const float* part = partials[p].out.data() + i * a.dim_v;
          for (int64_t c = 0; c < a.dim_v; ++c) o[c] += weight * part[c];
        }
        for (int64_t c = 0; c < a.dim_v; ++c) o[c] /= sum;  // its own row is always seen: sum > 0
        lse[at] = top + std::log(sum);
      }
    }
  });
}

void attend_chunk_backward(const ChunkAttention& a, const float* out, const float* lse, const float* dout,
                           const ChunkAttentionGradient& gradient, ThreadPool& pool) {
  struct Head {
    HeadQueries queries;
    std::vector<float> u, lse, delta;
  };
  const std::vector<Piece> pieces = pieces_of(a);
  std::vector<Head> heads(size_t(a.kv_heads));
  pool.run(a.kv_heads, [&](int64_t h, int) {
    Head& head = heads[size_t(h)];
    head.queries = gather_queries(a, int(h));
    head.u = gather(a, dout, int(h), a.dim_v);
    head.lse = gather(a, lse, int(h), 1);
    const std::vector<float> o = gather(a, out, int(h), a.dim_v);
    head.delta.resize(head.lse.size());
    for (size_t i = 0; i < head.delta.size(); ++i) {
      double sum = 0;
      for (size_t c = 0; c < size_t(a.dim_v); ++c)
        sum += double(head.u[i * size_t(a.dim_v) + c]) * o[i * size_t(a.dim_v) + c];
      head.delta[i] = float(sum);
    }
  });
  std::vector<PieceGradient> parts(pieces.size());
  const int64_t prompt_values = a.prompt[0].rows * a.dim_k;  // of a head
  if (gradient.dprompt != nullptr) std::fill_n(gradient.dprompt, a.kv_heads * prompt_values, 0.0f);
  pool.run(int64_t(pieces.size()), [&](int64_t i, int) {
    const Piece& p = pieces[size_t(i)];
    const Head& head = heads[size_t(p.head)];
    backward_piece(a, p, head.queries, head.lse.data(), head.delta.data(), head.u,
                   gradient.dprompt == nullptr ? nullptr : gradient.dprompt + p.head * prompt_values, parts[size_t(i)]);
  });
  pool.run(a.kv_heads, [&](int64_t h, int) {
    const int64_t n_q = a.tokens * a.group;
    const auto dim = size_t(a.dim_k);
    std::vector<float> r_old(size_t(n_q) * dim), r_full(size_t(n_q) * dim), w_old(size_t(n_q), 0.0f);
    for (size_t p = 0; p < pieces.size(); ++p) {
      if (pieces[p].head != h) continue;
      std::vector<float>& r = pieces[p].old ? r_old : r_full;
      for (size_t c = 0; c < r.size(); ++c) r[c] += parts[p].r[c];
      for (size_t i = 0; pieces[p].old && i < w_old.size(); ++i) w_old[i] += parts[p].w[i];
      if (!pieces[p].chunk) continue;
      for (int64_t t = 0; t < a.tokens; ++t) {
        std::copy_n(parts[p].dk.data() + t * a.dim_k, a.dim_k, gradient.dk + (t * a.kv_heads + h) * a.dim_k);
        std::copy_n(parts[p].dv.data() + t * a.dim_v, a.dim_v, gradient.dv + (t * a.kv_heads + h) * a.dim_v);
      }
    }
    // What old rows give queries: mix (r - w mean) + w mean.
    const HeadQueries& queries = heads[size_t(h)].queries;
    const bool removed = removed_head(a, int(h)) != nullptr;
    if (removed) std::fill(r_old.begin(), r_old.end(), 0.0f);
    if (!queries.mean.empty() && !removed) {
      for (size_t i = 0; i < w_old.size(); ++i) {
        for (size_t c = 0; c < dim; ++c) r_old[i * dim + c] -= w_old[i] * queries.mean[c];
      }
    }
    std::vector<float> old(r_old.size(), 0.0f);
    if (a.mix != nullptr && !removed) {
      const float* mix = a.mix + h * a.dim_k * a.dim_k;
      if (gradient.dmix != nullptr) {
        std::vector<float> flipped(queries.full.size());
        transpose(queries.full.data(), n_q, a.dim_k, a.dim_k, flipped.data(), n_q);
        gemm_add(a.dim_k, a.dim_k, n_q, flipped.data(), n_q, r_old.data(), a.dim_k,
                 gradient.dmix + h * a.dim_k * a.dim_k, a.dim_k);
      }
      std::vector<float> flipped(dim * dim);
      transpose(mix, a.dim_k, a.dim_k, a.dim_k, flipped.data(), a.dim_k);
      gemm_add(n_q, a.dim_k, a.dim_k, r_old.data(), a.dim_k, flipped.data(), a.dim_k, old.data(), a.dim_k);
    } else if (!removed) {
      old = r_old;
    }
    for (int64_t i = 0; i < n_q; ++i) {
      const int64_t at = ((i / a.group * a.kv_heads + h) * a.group + i % a.group) * a.dim_k;
      for (size_t c = 0; c < dim; ++c) {
        const float mean = queries.mean.empty() ? 0.0f : w_old[size_t(i)] * queries.mean[c];
        gradient.dq[at + int64_t(c)] = a.scale * (old[size_t(i) * dim + c] + mean + r_full[size_t(i) * dim + c]);
      }
    }
  });
}

void chunk_mass(const ChunkAttention& a, const float* lse, float* mass, ThreadPool& pool) {
  const std::vector<Piece> pieces = pieces_of(a);
  const int64_t n_q = a.tokens * a.group, before = a.prompt[0].rows, width = before + a.tokens;
  std::fill_n(mass, int64_t(a.kv_heads) * a.group * width, 0.0f);
  pool.run(int64_t(pieces.size()), [&](int64_t i, int) {
    const Piece& p = pieces[size_t(i)];
    const HeadQueries queries = gather_queries(a, p.head);
    const std::vector<float> own = gather(a, lse, p.head, 1);
    const Rows rows = rows_of_piece(a, p);
    std::vector<float> s(size_t(n_q * kTile)), keys(size_t(a.dim_k * kTile));
    for (int64_t row = p.begin; row < p.end; row += kTile) {
      const int64_t n = std::min(kTile, p.end - row);
      tile_scores(a, p, rows, queries, row, n, keys.data(), s.data());
      for (int64_t q = 0; q < n_q; ++q) {
        float* line = s.data() + q * kTile;
        for (int64_t j = 0; j < n; ++j) line[j] = std::min(line[j] - own[size_t(q)], 0.0f);
        exp_nonpositive(line, line, n);
        float* to = mass + (int64_t(p.head) * a.group + q % a.group) * width + (p.chunk ? before : 0) + row;
        for (int64_t j = 0; j < n; ++j) to[j] += line[j];
      }
    }
  });
}

}  // namespace longkv
