#ifdef LONGKV_WITH_CUDA

#include "cuda/channel_gram.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "cuda/carver.h"
#include "cuda/channels.h"
#include "cuda/chunk.h"
#include "kv/layout.h"

namespace longkv {

namespace {

// What travels to the card together. Queries of the wanted rows, those of a KV head together, times the scale.
struct Inputs {
  float *q, *masked, *lse, *out, *away;
};

}  // namespace

struct CardChannelGrams::Call {
  int heads = 0, group = 0;
  int64_t dim_k = 0, dim_v = 0, tokens = 0, n = 0, dim = 0, side = 0, piece_rows = 0;
  CardPromptRows::Rows rows;
  Inputs in{};
  int64_t in_bytes = 0;
  uint8_t* in_data = nullptr;
  float *mean = nullptr, *keys = nullptr, *s = nullptr, *weighted = nullptr, *c = nullptr, *m = nullptr, *y = nullptr,
        *wo = nullptr, *z = nullptr, *grams = nullptr;

  Inputs lay_inputs(Carver& carve) const {
    Inputs i{};
    i.q = carve.take<float>(heads * n * dim_k);
    i.masked = carve.take<float>(heads * n * dim_k);
    i.lse = carve.take<float>(heads * n);
    i.out = carve.take<float>(heads * n * dim_v);
    i.away = carve.take<float>(heads * n * dim_v);
    return i;
  }
};

Status CardChannelGrams::open(const ChunkAttention& a, const ChannelGramInputs& in, Call& call) {
  call.heads = a.kv_heads;
  call.group = a.group;
  call.dim_k = a.dim_k;
  call.dim_v = a.dim_v;
  call.tokens = int64_t(in.rows.size());
  call.n = call.tokens * a.group;
  call.dim = in.wo->rows;
  call.side = a.dim_k + 1;
  const int64_t old = count_of(a.middle), h = a.kv_heads;
  call.piece_rows = std::clamp<int64_t>(weighted_bytes_ / (call.n * a.dim_v * 4), 1, std::max<int64_t>(old, 1));
  const auto lay = [&](Carver carve) {
    call.in = call.lay_inputs(carve);
    call.in_bytes = carve.used();
    call.mean = carve.take<float>(h * call.dim_k);
    call.keys = carve.take<float>(h * call.piece_rows * call.dim_k);
    call.s = carve.take<float>(h * call.n * call.piece_rows);
    call.weighted = carve.take<float>(call.n * call.piece_rows * call.dim_v);
    call.c = carve.take<float>(h * call.n * call.dim_k * call.dim_v);
    call.m = carve.take<float>(h * call.n * call.dim_k);
    call.y = carve.take<float>(h * call.n * call.side * call.dim_v);
    call.wo = carve.take<float>(call.dim * h * call.group * call.dim_v);
    call.z = carve.take<float>(h * call.tokens * call.side * call.dim);
    call.grams = carve.take<float>(h * call.side * call.side);
    return carve.used();
  };
  LONGKV_TRY(rows_.grow(memory_, lay(Carver(nullptr)), "what dropped channels change"));
  lay(Carver(memory_.data()));
  call.in_data = memory_.data();
  const int64_t needed = std::max(call.in_bytes, h * call.side * call.side * 4);
  if (host_.bytes() < needed) {
    host_ = PinnedBuffer();
    LONGKV_ASSIGN(host_, PinnedBuffer::create(needed, "staging of a chunk"));
  }
  return {};
}

Status CardChannelGrams::send(const ChunkAttention& a, const ChannelGramInputs& in, const Call& call) {
  Carver carver(host_.as<uint8_t>());
  const Inputs to = call.lay_inputs(carver);
  pool_.run(call.tokens * a.kv_heads, [&](int64_t task, int) {
    const int64_t i = task / a.kv_heads, h = task % a.kv_heads;
    for (int64_t g = 0; g < a.group; ++g) {
      const int64_t from = (in.rows[size_t(i)] * a.kv_heads + h) * a.group + g, at = h * call.n + i * a.group + g;
      for (int64_t c = 0; c < a.dim_k; ++c) {
        const float q = a.scale * a.q[from * a.dim_k + c];
        to.q[at * a.dim_k + c] = q;
        to.masked[at * a.dim_k + c] = in.mask[h * a.dim_k + c] * q;
      }
      to.lse[at] = in.lse[from];
      for (int64_t c = 0; c < a.dim_v; ++c) {
        to.out[at * a.dim_v + c] = in.out[from * a.dim_v + c];
        to.away[at * a.dim_v + c] = in.out[from * a.dim_v + c] - in.teacher_out[from * a.dim_v + c];
      }
    }
  });
  return cuda_status(
      cudaMemcpyAsync(call.in_data, host_.as<uint8_t>(), size_t(call.in_bytes), cudaMemcpyHostToDevice, stream_),
      "a chunk's queries");
}

// Old rows [begin, end): adds probabilities times keys and values to c and m.
Status CardChannelGrams::piece(const ChunkAttention& a, const Call& call, int64_t begin, int64_t end) {
  const int64_t n = call.n, rows = end - begin, held = call.rows.end - call.rows.begin, dk = call.dim_k,
                dv = call.dim_v;
  const float* mean = a.compensate ? call.mean : nullptr;
  const float *k = call.rows.k + (begin - call.rows.begin) * dk, *v = call.rows.v + (begin - call.rows.begin) * dv;
  const bool add = begin > a.middle.begin;
  LONGKV_TRY(card::center_keys(k, held * dk, mean, call.heads, rows, int(dk), call.keys, stream_));
  const CardProduct scores{n, rows, dk, false, true, dk, dk, rows, call.heads, n * dk, rows * dk, n * rows};
  LONGKV_TRY(gemm_.run(scores, call.in.masked, call.keys, call.s, stream_));
  LONGKV_TRY(card::channel_weights(call.in.q, mean, call.in.lse, call.heads, n, rows, int(dk), call.s, stream_));
  CardProduct to_m{n, dk, rows, false, false, rows, dk, dk, call.heads, n * rows, rows * dk, n * dk};
  to_m.add = add;
  LONGKV_TRY(gemm_.run(to_m, call.s, call.keys, call.m, stream_));
  for (int64_t h = 0; h < call.heads; ++h) {
    LONGKV_TRY(
        card::weighted_values(call.s + h * n * rows, v + h * held * dv, n, rows, int(dv), call.weighted, stream_));
    CardProduct to_c{dk, dv, rows, true, false, dk, dv, dv, n, 0, rows * dv, dk * dv};
    to_c.add = add;
    LONGKV_TRY(gemm_.run(to_c, call.keys + h * rows * dk, call.weighted, call.c + h * n * dk * dv, stream_));
  }
  return {};
}

Status CardChannelGrams::run(const ChunkAttention& a, const ChannelGramInputs& in,
                             const std::function<Status(float*)>& wo, double* grams) {
  const int64_t values = int64_t(a.kv_heads) * (a.dim_k + 1) * (a.dim_k + 1);
  std::fill_n(grams, values, 0.0);
  if (in.rows.empty()) return {};
  Call call;
  LONGKV_TRY(open(a, in, call));
  LONGKV_TRY(send(a, in, call));
  LONGKV_TRY(wo(call.wo));
  LONGKV_ASSIGN(call.rows, rows_.get(a));  // last: buffers may displace copies of rows
  const int64_t held = call.rows.end - call.rows.begin, side = call.side, width = call.group * call.dim_v;
  if (count_of(a.middle) <= 0) {  // nothing is old: only `away` remains
    LONGKV_TRY(
        cuda_status(cudaMemsetAsync(call.c, 0, size_t(a.kv_heads * call.n * a.dim_k * a.dim_v) * 4, stream_), "c"));
    LONGKV_TRY(cuda_status(cudaMemsetAsync(call.m, 0, size_t(a.kv_heads * call.n * a.dim_k) * 4, stream_), "m"));
  } else if (a.compensate) {
    LONGKV_TRY(card::mean_keys(call.rows.k, held * a.dim_k, a.kv_heads, a.dim_k, a.middle.begin - call.rows.begin,
                               a.middle.end - call.rows.begin, call.mean, stream_));
  }
  for (int64_t begin = a.middle.begin; begin < a.middle.end; begin += call.piece_rows) {
    LONGKV_TRY(piece(a, call, begin, std::min(a.middle.end, begin + call.piece_rows)));
  }
  const card::ChannelOutputs outputs{a.kv_heads, a.group, a.dim_k,   a.dim_v,     call.tokens,
                                     call.c,     call.m,  call.in.q, call.in.out, call.in.away};
  LONGKV_TRY(card::channel_outputs(outputs, call.y, stream_));
  const int64_t lines = call.tokens * side;
  const CardProduct to_z{lines,      call.dim,      width, false,           true, width, width * a.kv_heads, call.dim,
                         a.kv_heads, lines * width, width, lines * call.dim};
  LONGKV_TRY(gemm_.run(to_z, call.y, call.wo, call.z, stream_));
  for (int64_t t = 0; t < call.tokens; ++t) {
    CardProduct to_gram{side,
                        side,
                        call.dim,
                        false,
                        true,
                        call.dim,
                        call.dim,
                        side,
                        a.kv_heads,
                        lines * call.dim,
                        lines * call.dim,
                        side * side};
    to_gram.add = t > 0;
    const float* z = call.z + t * side * call.dim;
    LONGKV_TRY(gemm_.run(to_gram, z, z, call.grams, stream_));
  }
  LONGKV_TRY(
      cuda_status(cudaMemcpyAsync(host_.as<float>(), call.grams, size_t(values) * 4, cudaMemcpyDeviceToHost, stream_),
                  "what dropped channels change"));
  LONGKV_TRY(cuda_status(cudaStreamSynchronize(stream_), "what dropped channels change"));
  for (int64_t i = 0; i < values; ++i) grams[i] = host_.as<float>()[i];
  return {};
}

}  // namespace longkv

#endif
