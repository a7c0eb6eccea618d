// Rotation and storing of queries, keys and values; rows of the cache as they read back.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/key_row.cuh"
#include "cuda/kv.h"
#include "cuda/launch.cuh"

namespace longkv::card {

namespace {

__global__ void angles_kernel(const double2* __restrict__ fine, const double2* __restrict__ coarse, int half,
                              double magnitude, const int64_t* first, int64_t n, float2* __restrict__ out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * half) return;
  const int64_t position = *first + i / half;
  const int pair = int(i % half);
  const double2 a = coarse[(position / 1024) * half + pair], b = fine[(position % 1024) * half + pair];
  out[i] = make_float2(float((a.x * b.x - a.y * b.y) * magnitude), float((a.y * b.x + a.x * b.y) * magnitude));
}

__global__ void position_kernel(int64_t* to, int64_t position) { *to = position; }

// Stores channel `c` of the row whose values and scales begin there; all lanes of a warp hold 32 neighbouring channels,
// `top` is the row's largest magnitude (fp8 only). Returns what reads back.
__device__ __forceinline__ float store_at(KvType type, uint8_t* values, half_t* scales, int c, float v, float top) {
  if (type == KvType::kF16) {
    const __half h = __float2half_rn(v);
    reinterpret_cast<__half*>(values)[c] = h;
    return __half2float(h);
  }
  if (type == KvType::kBf16) {
    const __nv_bfloat16 h = __float2bfloat16_rn(v);
    reinterpret_cast<__nv_bfloat16*>(values)[c] = h;
    return __bfloat162float(h);
  }
  if (type == KvType::kFp8) {
    const __nv_bfloat16 scale = __float2bfloat16_rn(top < 0x1p-100f ? 0.0f : top / 448.0f);
    const float s = __bfloat162float(scale);
    const __nv_fp8_e4m3 code(s > 0.0f ? v / s : 0.0f);
    values[c] = code.__x;
    if (c == 0) scales[0] = __bfloat16_as_ushort(scale);
    return s * float(code);
  }
  if (type == KvType::kQ4_0) {
    const float high = warp_max(v), low = -warp_max(-v);
    const __half scale = __float2half_rn((high > -low ? high : low) / -8.0f);
    const float s = __half2float(scale);
    const int q = s != 0.0f ? min(7, max(-8, __float2int_rn(v / s))) : 0;
    uint32_t word = uint32_t(q + 8) << (c % 8 / 2 * 4 + c % 2 * 16);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) word |= __shfl_xor_sync(kAllLanes, word, step);
    if (c % 8 == 0) reinterpret_cast<uint32_t*>(values)[c / 8] = word;
    if (c % 32 == 0) scales[c / 32] = __half_as_ushort(scale);
    return s * float(q);
  }
  const __half scale = __float2half_rn(warp_max(fabsf(v)) / 127.0f);
  const float s = __half2float(scale);
  const int q = s > 0.0f ? min(127, max(-127, __float2int_rn(v / s))) : 0;
  reinterpret_cast<int8_t*>(values)[c] = int8_t(q);
  if (c % 32 == 0) scales[c / 32] = __half_as_ushort(scale);
  return s * float(q);
}
__device__ __forceinline__ float store_value(const CardKv& kv, bool key, int64_t row, int c, float v, float top) {
  return store_at(kv.type, (key ? kv.k : kv.v) + row * value_bytes(kv.type, kv.dim),
                  (key ? kv.k_scale : kv.v_scale) + row * scale_count(kv.type, kv.dim), c, v, top);
}
// The row at `position` to its block in memory and, where that block is on the card, there too.
__device__ __forceinline__ void store_in_block(const AppendArgs& a, bool key, int kv_head, int64_t position, int c,
                                               float v, float top) {
  const BlockStore& s = a.store;
  const int64_t block = position / s.block, row = position % s.block;
  uint8_t* record = s.data + (kv_head * s.blocks + block) * s.record;
  uint8_t* values = record + (key ? 0 : s.plane) + row * (s.plane / s.block);
  uint8_t* scales = record + 2 * s.plane + (key ? 0 : s.scales) + row * (s.scales / s.block);
  (void)store_at(s.type, values, reinterpret_cast<half_t*>(scales), c, v, top);
  const int32_t slot = a.slot_of[kv_head * s.blocks + block];
  if (slot >= 0) (void)store_value(a.kv, key, kv_head * a.kv.capacity + slot * int64_t(s.block) + row, c, v, top);
}

__global__ void append_kernel(AppendArgs a, CardKv work) {
  __shared__ float row[256];
  __shared__ float shared[32];
  let_next_start();
  wait_for_previous();
  const int head = int(blockIdx.x), c = int(threadIdx.x), dim = a.kv.dim, kv_heads = a.kv.kv_heads;
  const int64_t t = blockIdx.y;
  const int64_t width = int64_t(a.heads + 2 * kv_heads) * dim;
  const int64_t from = int64_t(head) * dim + c;
  float v = a.qkv[t * width + from];
  if (a.bias != nullptr) v += a.bias[from];
  const bool query = head < a.heads, key = !query && head < a.heads + kv_heads;
  if (query || key) {
    const float* norm = query ? a.q_norm : a.k_norm;
    if (norm != nullptr) v *= rsqrtf(block_sum(v * v, shared) / float(dim) + a.eps) * norm[c];
    row[c] = v;
    __syncthreads();
    const int half = a.rope.half;
    if (c < 2 * half) {
      const bool adjacent = a.rope.pairs == RopePairs::kAdjacent;
      const int pair = adjacent ? c / 2 : c % half;
      const bool second = adjacent ? c % 2 == 1 : c >= half;
      const float other = row[adjacent ? c ^ 1 : second ? c - half : c + half];
      const float2 turn = reinterpret_cast<const float2*>(a.angles)[t * half + pair];
      v = second ? other * turn.y + v * turn.x : v * turn.x - other * turn.y;
    }
  }
  if (a.kv.k == nullptr) a.qkv[t * width + from] = v;
  if (query) {
    half_t* out = a.q + (t * a.heads + head) * dim + c;
    if (a.kv.type == KvType::kBf16) {
      *reinterpret_cast<__nv_bfloat16*>(out) = __float2bfloat16_rn(v);
    } else {
      *reinterpret_cast<__half*>(out) = __float2half_rn(v);
    }
    return;
  }
  const int kv_head = (head - a.heads) % kv_heads;
  const int64_t position = *a.first + t;
  float top = 0.0f;
  if (a.kv.type == KvType::kFp8) {
    __syncthreads();  // `shared` may be read yet
    top = block_max(fabsf(v), shared);
  }
  if (a.store.data != nullptr) {
    store_in_block(a, key, kv_head, position, c, v, top);
    return;
  }
  float back = v;
  if (a.kv.k != nullptr) back = store_value(a.kv, key, kv_head * a.kv.capacity + a.kv.place(position), c, v, top);
  if (work.k != nullptr) (void)store_value(work, key, kv_head * work.capacity + position, c, back, top);
}

__global__ void decode_rows_kernel(CardKv kv, int64_t first, int64_t n, CardKv work) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * kv.dim) return;
  const int64_t row = first + i / kv.dim;
  const int c = int(i % kv.dim);
  const int64_t to = (blockIdx.y / 2 * work.capacity + row) * kv.dim + c;
  const bool key = blockIdx.y % 2 == 0;
  const float v = stored_row(kv, key, int(blockIdx.y) / 2, row).at(c);
  reinterpret_cast<__half*>(key ? work.k : work.v)[to] = __float2half_rn(v);
}

// Two normal values from a counter: 64-bit mixing, then Box and Muller's transform.
__device__ float random_normal(uint64_t seed, uint64_t i) {
  uint64_t z = seed * 0x9e3779b97f4a7c15ull + i * 0xd1342543de82ef95ull + 0x2545f4914f6cdd1dull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  const float u = (float(uint32_t(z >> 40)) + 0.5f) * 0x1p-24f, w = float(uint32_t(z) >> 8) * 0x1p-24f;
  return sqrtf(-2.0f * __logf(u)) * __cosf(6.2831853f * w);
}

__global__ void fill_kernel(CardKv kv, int64_t n, uint64_t seed) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;  // whole warps: dim is a multiple of 32
  if (i >= n * kv.dim) return;
  const int64_t row = (blockIdx.y / 2) * kv.capacity + i / kv.dim;
  // One scale does for every row of such values: none is larger in what a cache holds.
  constexpr float kTop = 7.0f;
  (void)store_value(kv, blockIdx.y % 2 == 0, row, int(i % kv.dim), random_normal(seed * 4096 + blockIdx.y, uint64_t(i)),
                    kTop);
}

}  // namespace

Status set_position(int64_t* to, int64_t position, CardStreamHandle stream) {
  position_kernel<<<1, 1, 0, stream>>>(to, position);
  return launched("set_position");
}

Status rope_angles(const CardRope& rope, const int64_t* first, int64_t n, float* out, CardStreamHandle stream) {
  angles_kernel<<<unsigned((n * rope.half + 127) / 128), 128, 0, stream>>>(
      reinterpret_cast<const double2*>(rope.fine), reinterpret_cast<const double2*>(rope.coarse), rope.half,
      double(rope.magnitude), first, n, reinterpret_cast<float2*>(out));
  return launched("rope_angles");
}

Status append_rows(const AppendArgs& a, CardStreamHandle stream) {
  const dim3 grid(unsigned(a.heads + 2 * a.kv.kv_heads), unsigned(a.n));
  return launch_close("append_rows", append_kernel, grid, unsigned(a.kv.dim), stream, a,
                      a.work != nullptr ? *a.work : CardKv{});
}

Status decode_rows(const CardKv& kv, int64_t first, int64_t n, const CardKv& work, CardStreamHandle stream) {
  if (n <= 0) return {};
  const dim3 grid(unsigned((n * kv.dim + 255) / 256), unsigned(2 * kv.kv_heads));
  decode_rows_kernel<<<grid, 256, 0, stream>>>(kv, first, n, work);
  return launched("decode_rows");
}

Status fill_rows(const CardKv& kv, int64_t n, uint64_t seed, CardStreamHandle stream) {
  if (n <= 0) return {};
  const dim3 grid(unsigned((n * kv.dim + 255) / 256), unsigned(2 * kv.kv_heads));
  fill_kernel<<<grid, 256, 0, stream>>>(kv, n, seed);
  return launched("fill_rows");
}

}  // namespace longkv::card
