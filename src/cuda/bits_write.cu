// Rows of keys to the one-bit index.
#include "cuda/bits_rows.cuh"
#include "cuda/key_row.cuh"

namespace longkv::card {

namespace {

constexpr int kThreads = 256;
constexpr int kChunk = CardBits::kChunk;

// Places of a row's code word and of its magnitudes, in words and halves from the head's first.
template <int kDim>
__device__ __forceinline__ int64_t code_at(int64_t position, int word) {
  const int tile = int(position % kChunk) / 16, row = int(position % 16), g = row % 8, second = row / 8;
  const int64_t chunk = position / kChunk * (kChunk * kDim / 32);
  if (kDim == 64) return chunk + (((tile / 2 * 8 + g) * 2 + word) * 2 + tile % 2) * 2 + second;
  constexpr int kLaneWords = kDim == 64 ? 1 : kDim / 128;
  const int lane = g * 4 + word / kLaneWords;
  return chunk + (((tile / 2 * kLaneWords + word % kLaneWords) * 32 + lane) * 2 + tile % 2) * 2 + second;
}
template <int kDim>
__device__ __forceinline__ int64_t size_at(int64_t position, int group) {
  const int tile = int(position % kChunk) / 16, row = int(position % 16);
  return position / kChunk * (kChunk * kDim / 32) + ((tile * 8 + row % 8) * 2 + row / 8) * (kDim / 32) + group;
}

// A warp a row.
template <int kDim, class Rows>
__device__ __forceinline__ void write_row(const Rows& rows, const CardBits& bits, int head, int64_t position) {
  constexpr int kWords = kDim / 32;
  const int lane = threadIdx.x % 32;
  const KeyRow row = key_row(rows, head, position);
  float x[kWords];
#pragma unroll
  for (int j = 0; j < kWords; ++j) x[j] = row.at(32 * j + lane);
  if (bits.rotate) hadamard(x, lane);
  const int64_t base = head * bits.tokens * kWords;
  uint32_t mine = 0;  // lane w: word w
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const unsigned signs = __ballot_sync(kAllLanes, x[j] >= 0.0f);
    const float sum = warp_sum(fabsf(x[j])), square = warp_sum(x[j] * x[j]);
    const float size = !bits.unbiased ? sum / 32.0f : sum == 0.0f ? 0.0f : square / sum;
    if (lane == j) {
      const float scaled = fminf(size * (8.0f / float(1 << (2 * (j % 4)))), 65504.0f);
      bits.magnitudes[base + size_at<kDim>(position, j)] = __half_as_ushort(__float2half_rn(scaled));
    }
    // The word's share of this group: of lanes c whose bits it holds, two runs of four channels.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = kDim == 64 ? 2 * lane + i : kDim == 128 ? lane : lane / 2;
      const int plane = kDim == 64 ? 4 * (i & 1) + 2 * j : 2 * (j % 4);
      const bool here = kDim == 64 ? i < 2 : i == 0 && (kDim == 128 || lane % 2 == j / 4);
      if (!here) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t run = signs >> ((8 * c + 4 * h) & 31) & 15u;
        mine |= (run * 0x00204081u & 0x01010101u) << (plane + h);
      }
    }
  }
  if (lane < kWords) bits.codes[base + code_at<kDim>(position, lane)] = mine;
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) write_kernel(CardKv kv, CardBits bits, int64_t first, int64_t n) {
  const int64_t row = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row < n) write_row<kDim>(kv, bits, int(blockIdx.y), first + row);
}
template <int kDim, class Rows>
__global__ void write_last_kernel(Rows rows, CardBits bits, const int64_t* position) {
  let_next_start();
  wait_for_previous();
  write_row<kDim>(rows, bits, int(blockIdx.x), *position);
}

template <class Rows>
Status write_last(const Rows& rows, const CardBits& bits, const int64_t* position, CardStreamHandle stream) {
  const auto heads = unsigned(rows.kv_heads);
  switch (rows.dim) {
    case 64: return launch_close("write_bits", write_last_kernel<64, Rows>, heads, 32, stream, rows, bits, position);
    case 128: return launch_close("write_bits", write_last_kernel<128, Rows>, heads, 32, stream, rows, bits, position);
    case 256: return launch_close("write_bits", write_last_kernel<256, Rows>, heads, 32, stream, rows, bits, position);
    default: return Status(Code::kUnsupported, "write_bits: head dimension");
  }
}

}  // namespace

Status write_bits(const CardKv& kv, const CardBits& bits, int64_t first, int64_t n, CardStreamHandle stream) {
  if (n <= 0) return {};
  const dim3 grid(unsigned((n + kThreads / 32 - 1) / (kThreads / 32)), unsigned(kv.kv_heads));
  switch (kv.dim) {
    case 64: write_kernel<64><<<grid, kThreads, 0, stream>>>(kv, bits, first, n); break;
    case 128: write_kernel<128><<<grid, kThreads, 0, stream>>>(kv, bits, first, n); break;
    case 256: write_kernel<256><<<grid, kThreads, 0, stream>>>(kv, bits, first, n); break;
    default: return Status(Code::kUnsupported, "write_bits: head dimension");
  }
  return launched("write_bits");
}
Status write_bits_last(const CardKv& kv, const CardBits& bits, const int64_t* position, CardStreamHandle stream) {
  return write_last(kv, bits, position, stream);
}
Status write_bits_last(const BlockStore& rows, const CardBits& bits, const int64_t* position, CardStreamHandle stream) {
  return write_last(rows, bits, position, stream);
}

}  // namespace longkv::card
