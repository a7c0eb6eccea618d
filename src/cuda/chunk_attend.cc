#ifdef LONGKV_WITH_CUDA

#include "cuda/chunk_attend.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/carver.h"
#include "cuda/chunk.h"
#include "kv/layout.h"

namespace longkv {

namespace {

// Consecutive rows whose scores are held at once: of the prompt, all old or none, or the chunk's own.
struct Piece {
  int64_t begin, end;
  bool old, chunk;
};

// What travels to the card together, and back.
struct Inputs {
  card::CardOldHead* heads;
  float *q, *k, *v, *mix, *dout, *out, *lse;
};
struct Results {
  float *out, *lse;            // forward
  float *dq, *dk, *dv, *dmix;  // backward
};

}  // namespace

struct CardChunkAttention::Call {
  card::ChunkQueries q;
  CardPromptRows::Rows rows;
  std::vector<Piece> pieces;
  bool backward = false, old = false, mixed = false, mean = false;
  int64_t widest = 0;  // rows of the largest piece
  Inputs in{};
  int64_t in_bytes = 0, result_bytes = 0;
  Results results{};
  uint8_t *in_data = nullptr, *result_data = nullptr;
  float *old_q = nullptr, *shift = nullptr, *means = nullptr, *s = nullptr, *sum = nullptr;
  float *d = nullptr, *r_old = nullptr, *turned = nullptr, *total = nullptr, *delta = nullptr;

  Inputs lay_inputs(Carver& c) const {
    Inputs i{};
    i.heads = c.take<card::CardOldHead>(q.kv_heads);
    i.q = c.take<float>(q.all() * q.dim_k);
    i.k = c.take<float>(q.kv_heads * q.tokens * q.dim_k);
    i.v = c.take<float>(q.kv_heads * q.tokens * q.dim_v);
    if (mixed) i.mix = c.take<float>(int64_t(q.kv_heads) * q.dim_k * q.dim_k);
    if (!backward) return i;
    i.dout = c.take<float>(q.all() * q.dim_v);
    i.out = c.take<float>(q.all() * q.dim_v);
    i.lse = c.take<float>(q.all());
    return i;
  }
  Results lay_results(Carver& c) const {
    Results r{};
    if (!backward) {
      r.out = c.take<float>(q.all() * q.dim_v);
      r.lse = c.take<float>(q.all());
      return r;
    }
    r.dq = c.take<float>(q.all() * q.dim_k);
    r.dk = c.take<float>(q.kv_heads * q.tokens * q.dim_k);
    r.dv = c.take<float>(q.kv_heads * q.tokens * q.dim_v);
    if (mixed) r.dmix = c.take<float>(int64_t(q.kv_heads) * q.dim_k * q.dim_k);
    return r;
  }
  // Keys or values of a piece: where head 0's begin, and the values from one head to the next.
  const float* keys(const Piece& p, int64_t& step) const {
    step = (p.chunk ? q.tokens : rows.end - rows.begin) * q.dim_k;
    return p.chunk ? in.k : rows.k + (p.begin - rows.begin) * q.dim_k;
  }
  const float* values(const Piece& p, int64_t& step) const {
    step = (p.chunk ? q.tokens : rows.end - rows.begin) * q.dim_v;
    return p.chunk ? in.v : rows.v + (p.begin - rows.begin) * q.dim_v;
  }
  card::ChunkScores scores(const Piece& p) const {
    return {s, p.end - p.begin, p.chunk ? q.first : p.begin, p.old ? shift : nullptr};
  }
};

Status CardChunkAttention::open(const ChunkAttention& a, bool backward, int64_t dprompt_bytes, Call& call) {
  const int64_t before = a.prompt[0].rows;
  call.q = {a.kv_heads, a.group, a.tokens, before, a.window, a.dim_k, a.dim_v, nullptr, a.compensate};
  call.backward = backward;
  const auto is = [&](const OldHead& h, RemovedAs as) { return h.removed && h.as == as; };
  const bool none = a.without_middle || (!a.heads.empty() && std::all_of(a.heads.begin(), a.heads.end(), [&](auto& h) {
                      return is(h, RemovedAs::kDrop);
                    }));
  const int64_t first = std::max(a.prompt[0].first_row, first_visible_row(before, a.window));
  const RowRange middle = count_of(a.middle) > 0 ? a.middle : RowRange{before, before};
  call.old = count_of(a.middle) > 0 && !none;
  call.mixed = call.old && a.mix != nullptr;
  call.mean = call.old && (a.heads.empty() ? a.compensate : std::any_of(a.heads.begin(), a.heads.end(), [&](auto& h) {
                return h.removed ? h.as == RemovedAs::kMean : a.compensate;
              }));
  call.q.compensate = a.compensate && call.old;
  const int64_t most = std::max<int64_t>(64, score_bytes_ / (call.q.all() * 4) / 64 * 64);
  const auto add = [&](int64_t begin, int64_t end, bool old, bool chunk) {
    for (int64_t r = begin; r < end; r += most) {
      call.pieces.push_back({r, std::min(end, r + most), old, chunk});
      call.widest = std::max(call.widest, call.pieces.back().end - r);
    }
  };
  add(first, middle.begin, false, false);
  if (call.old) add(std::max(first, middle.begin), middle.end, true, false);
  add(std::max(first, middle.end), before, false, false);
  call.pieces.push_back({0, a.tokens, false, true});  // its rows go together: gradients of all of them are set
  call.widest = std::max(call.widest, a.tokens);

  const auto lay = [&](Carver c) {
    const int64_t start = c.used();
    call.in = call.lay_inputs(c);
    call.in_bytes = c.used() - start;
    call.results = call.lay_results(c);
    call.result_bytes = c.used() - start - call.in_bytes;
    const card::ChunkQueries& q = call.q;
    call.old_q = c.take<float>(call.old ? q.all() * q.dim_k : 0);
    call.shift = c.take<float>(q.all());
    call.means = c.take<float>(q.kv_heads * q.dim_k);
    call.s = c.take<float>(q.all() * call.widest);
    call.sum = c.take<float>(q.all());
    if (!backward) return c.used();
    call.d = c.take<float>(q.all() * call.widest);
    call.r_old = c.take<float>(q.all() * q.dim_k);
    call.turned = c.take<float>(call.mixed ? q.all() * q.dim_k : 0);
    call.total = c.take<float>(q.all());
    call.delta = c.take<float>(q.all());
    return c.used();
  };
  // Buffers first: what they displace are copies of rows.
  LONGKV_TRY(rows_.grow(memory_, lay(Carver(nullptr)), fmt::format("attention of a chunk of {} tokens", a.tokens)));
  if (dprompt_bytes > 0) LONGKV_TRY(rows_.grow(dprompt_, dprompt_bytes, "gradient of a prompt's keys"));
  LONGKV_ASSIGN(call.rows, rows_.get(a));
  lay(Carver(memory_.data()));
  call.in_data = memory_.data();
  call.result_data = memory_.data() + call.in_bytes;
  call.q.heads = call.in.heads;
  const int64_t needed = std::max(call.in_bytes, call.result_bytes);
  if (host_.bytes() < needed) {
    host_ = PinnedBuffer();
    LONGKV_ASSIGN(host_, PinnedBuffer::create(needed, "staging of a chunk"));
  }
  return {};
}

// Brings what the chunk gives to the card; queries scaled, those of a KV head together.
Status CardChunkAttention::send(const ChunkAttention& a, const float* out, const float* lse, const float* dout,
                                Call& call) {
  Carver carver(host_.as<uint8_t>());
  const Inputs to = call.lay_inputs(carver);
  for (int h = 0; h < a.kv_heads; ++h) {
    const OldHead head = a.heads.empty() || !call.old ? OldHead{} : a.heads[size_t(h)];
    to.heads[h] = {!head.removed                     ? card::OldKind::kMixed
                   : head.as == RemovedAs::kMean     ? card::OldKind::kMean
                   : head.as == RemovedAs::kConstant ? card::OldKind::kConstant
                                                     : card::OldKind::kNone,
                   head.score};
  }
  const int64_t n_q = call.q.of_head();
  if (call.mixed) std::memcpy(to.mix, a.mix, size_t(a.kv_heads) * size_t(a.dim_k) * size_t(a.dim_k) * 4);
  pool_.run(a.tokens, [&](int64_t t, int) {
    for (int h = 0; h < a.kv_heads; ++h) {
      const int64_t at = (t * a.kv_heads + h) * a.group, place = h * n_q + t * a.group;
      for (int64_t i = 0; i < a.group * a.dim_k; ++i) to.q[place * a.dim_k + i] = a.scale * a.q[at * a.dim_k + i];
      std::copy_n(a.k + (t * a.kv_heads + h) * a.dim_k, a.dim_k, to.k + (h * a.tokens + t) * a.dim_k);
      std::copy_n(a.v + (t * a.kv_heads + h) * a.dim_v, a.dim_v, to.v + (h * a.tokens + t) * a.dim_v);
      if (!call.backward) continue;
      std::copy_n(dout + at * a.dim_v, a.group * a.dim_v, to.dout + place * a.dim_v);
      std::copy_n(out + at * a.dim_v, a.group * a.dim_v, to.out + place * a.dim_v);
      std::copy_n(lse + at, a.group, to.lse + place);
    }
  });
  return cuda_status(
      cudaMemcpyAsync(call.in_data, host_.as<uint8_t>(), size_t(call.in_bytes), cudaMemcpyHostToDevice, stream_),
      "a chunk's queries, keys and values");
}

Status CardChunkAttention::prepare(const ChunkAttention& a, Call& call) {
  if (!call.old) return {};
  const card::ChunkQueries& q = call.q;
  const int64_t n_q = q.of_head(), dim = q.dim_k;
  if (call.mixed) {
    const CardProduct mix{n_q, dim, dim, false, false, dim, dim, dim, q.kv_heads, n_q * dim, dim * dim, n_q * dim};
    LONGKV_TRY(gemm_.run(mix, call.in.q, call.in.mix, call.old_q, stream_));
  } else {
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(call.old_q, call.in.q, size_t(q.all() * dim) * 4, cudaMemcpyDeviceToDevice, stream_),
        "queries of old rows"));
  }
  if (call.mean) {
    LONGKV_TRY(card::mean_keys(call.rows.k, (call.rows.end - call.rows.begin) * dim, q.kv_heads, q.dim_k,
                               a.middle.begin - call.rows.begin, a.middle.end - call.rows.begin, call.means, stream_));
  }
  return card::old_shift(q, call.in.q, call.means, call.old_q, call.shift, stream_);
}

Status CardChunkAttention::scores_of(const Call& call, size_t piece) {
  const Piece& p = call.pieces[piece];
  const card::ChunkQueries& q = call.q;
  const int64_t n = p.end - p.begin, n_q = q.of_head(), dim = q.dim_k;
  int64_t step = 0;
  const float* k = call.keys(p, step);
  const CardProduct product{n_q, n, dim, false, true, dim, dim, n, q.kv_heads, n_q * dim, step, n_q * n};
  return gemm_.run(product, p.old ? call.old_q : call.in.q, k, call.s, stream_);
}

Status CardChunkAttention::fetch(void* to, const void* from, int64_t bytes) {
  LONGKV_TRY(
      cuda_status(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToHost, stream_), "attention of a chunk"));
  return cuda_status(cudaStreamSynchronize(stream_), "attention of a chunk");
}

Status CardChunkAttention::attend(const ChunkAttention& a, float* out, float* lse) {
  Call call;
  LONGKV_TRY(open(a, false, 0, call));
  LONGKV_TRY(send(a, nullptr, nullptr, nullptr, call));
  LONGKV_TRY(prepare(a, call));
  const card::ChunkQueries& q = call.q;
  const int64_t n_q = q.of_head();
  for (size_t i = 0; i < call.pieces.size(); ++i) {
    const Piece& p = call.pieces[i];
    const int64_t n = p.end - p.begin;
    LONGKV_TRY(scores_of(call, i));
    LONGKV_TRY(card::chunk_softmax(q, call.scores(p), i == 0, call.results.lse, call.sum, call.results.out, stream_));
    int64_t step = 0;
    const float* v = call.values(p, step);
    CardProduct product{n_q, q.dim_v, n, false, false, n, q.dim_v, q.dim_v, q.kv_heads, n_q * n, step, n_q * q.dim_v};
    product.add = true;
    LONGKV_TRY(gemm_.run(product, call.s, v, call.results.out, stream_));
  }
  LONGKV_TRY(card::chunk_finish(q, call.results.lse, call.sum, call.results.out, stream_));
  LONGKV_TRY(fetch(host_.as<uint8_t>(), call.result_data, call.result_bytes));
  Carver carver(host_.as<uint8_t>());
  const Results from = call.lay_results(carver);
  pool_.run(a.tokens, [&](int64_t t, int) {
    for (int h = 0; h < a.kv_heads; ++h) {
      const int64_t at = (t * a.kv_heads + h) * a.group, place = h * n_q + t * a.group;
      std::copy_n(from.out + place * a.dim_v, a.group * a.dim_v, out + at * a.dim_v);
      std::copy_n(from.lse + place, a.group, lse + at);
    }
  });
  return {};
}

Status CardChunkAttention::backward(const ChunkAttention& a, const float* out, const float* lse, const float* dout,
                                    const ChunkAttentionGradient& gradient) {
  Call call;
  const int64_t dprompt_bytes =
      gradient.dprompt != nullptr ? int64_t(a.kv_heads) * a.prompt[0].rows * a.dim_k * int64_t(sizeof(float)) : 0;
  LONGKV_TRY(open(a, true, dprompt_bytes, call));
  LONGKV_TRY(send(a, out, lse, dout, call));
  LONGKV_TRY(prepare(a, call));
  const card::ChunkQueries& q = call.q;
  const int64_t n_q = q.of_head(), dim = q.dim_k, before = a.prompt[0].rows;
  const auto clear = [&](float* x, int64_t n) {
    return cuda_status(cudaMemsetAsync(x, 0, size_t(n) * 4, stream_), "gradient of a chunk");
  };
  LONGKV_TRY(clear(call.results.dq, q.all() * dim));
  LONGKV_TRY(clear(call.r_old, q.all() * dim));
  LONGKV_TRY(clear(call.total, q.all()));
  if (dprompt_bytes > 0) LONGKV_TRY(clear(dprompt_.as<float>(), q.kv_heads * before * dim));
  LONGKV_TRY(card::row_products(call.in.dout, call.in.out, q.all(), q.dim_v, call.delta, stream_));
  for (size_t i = 0; i < call.pieces.size(); ++i) {
    const Piece& p = call.pieces[i];
    const int64_t n = p.end - p.begin;
    int64_t k_step = 0, v_step = 0;
    const float *k = call.keys(p, k_step), *v = call.values(p, v_step);
    LONGKV_TRY(scores_of(call, i));
    const CardProduct by_values{n_q,     n, q.dim_v,    false,         true,   q.dim_v,
                                q.dim_v, n, q.kv_heads, n_q * q.dim_v, v_step, n_q * n};
    LONGKV_TRY(gemm_.run(by_values, call.in.dout, v, call.d, stream_));
    LONGKV_TRY(card::chunk_score_gradient(q, call.scores(p), call.in.lse, call.delta, call.d, call.total, stream_));
    CardProduct by_keys{n_q, dim, n, false, false, n, dim, dim, q.kv_heads, n_q * n, k_step, n_q * dim};
    by_keys.add = true;
    LONGKV_TRY(gemm_.run(by_keys, call.d, k, p.old ? call.r_old : call.results.dq, stream_));
    if (p.chunk) {
      const CardProduct to_v{n,       q.dim_v, n_q,        true,    false,         n,
                             q.dim_v, q.dim_v, q.kv_heads, n_q * n, n_q * q.dim_v, n * q.dim_v};
      LONGKV_TRY(gemm_.run(to_v, call.s, call.in.dout, call.results.dv, stream_));
    }
    float* to = p.chunk ? call.results.dk : dprompt_bytes > 0 ? dprompt_.as<float>() + p.begin * dim : nullptr;
    if (to == nullptr) continue;
    const CardProduct to_k{n,   dim, n_q,        true,    false,     n,
                           dim, dim, q.kv_heads, n_q * n, n_q * dim, (p.chunk ? n : before) * dim};
    LONGKV_TRY(gemm_.run(to_k, call.d, call.in.q, to, stream_));
  }
  const float* old = call.r_old;
  if (call.old) LONGKV_TRY(card::old_gradient(q, call.means, call.total, call.r_old, stream_));
  if (call.mixed) {
    const CardProduct to_mix{dim, dim, n_q, true, false, dim, dim, dim, q.kv_heads, n_q * dim, n_q * dim, dim * dim};
    LONGKV_TRY(gemm_.run(to_mix, call.in.q, call.r_old, call.results.dmix, stream_));
    const CardProduct turn{n_q, dim, dim, false, true, dim, dim, dim, q.kv_heads, n_q * dim, dim * dim, n_q * dim};
    LONGKV_TRY(gemm_.run(turn, call.r_old, call.in.mix, call.turned, stream_));
    old = call.turned;
  }
  LONGKV_TRY(card::query_gradient(q, old, call.means, call.total, a.scale, call.results.dq, stream_));
  if (dprompt_bytes > 0) LONGKV_TRY(fetch(gradient.dprompt, dprompt_.data(), dprompt_bytes));
  LONGKV_TRY(fetch(host_.as<uint8_t>(), call.result_data, call.result_bytes));
  Carver carver(host_.as<uint8_t>());
  const Results from = call.lay_results(carver);
  pool_.run(a.tokens, [&](int64_t t, int) {
    for (int h = 0; h < a.kv_heads; ++h) {
      const int64_t row = t * a.kv_heads + h, at = row * a.group, place = h * n_q + t * a.group;
      std::copy_n(from.dq + place * dim, a.group * dim, gradient.dq + at * dim);
      std::copy_n(from.dk + (h * a.tokens + t) * dim, dim, gradient.dk + row * dim);
      std::copy_n(from.dv + (h * a.tokens + t) * a.dim_v, a.dim_v, gradient.dv + row * a.dim_v);
    }
  });
  if (gradient.dmix != nullptr && call.mixed) {
    for (int64_t i = 0; i < a.kv_heads * dim * dim; ++i) gradient.dmix[i] += from.dmix[i];
  }
  return {};
}

}  // namespace longkv

#endif
