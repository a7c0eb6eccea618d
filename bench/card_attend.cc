// Times a decoded token's attention on a card over rows of every kind, for the layers of one step.
//   card_attend [TOKENS [LAYERS]]       heads as in Llama-3.1-8B: 32 over 8, 128 channels; all rows
// Random rows; layers in turn use as many caches as exceed the card's second cache. Medians of 20 steps, in a graph,
// the merging of partials included.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "bench/card_timing.h"
#include "cuda/kv.h"
#include "cuda/old.h"

namespace {

using namespace longkv;
using namespace longkv::bench;

template <class T>
T* on_card(const std::vector<T>& values) {
  auto* p = reinterpret_cast<T*>(memory(int64_t(values.size() * sizeof(T))));
  check(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t tokens = (argc > 1 ? std::atoll(argv[1]) : int64_t(1) << 17) / 32 * 32;
  const int layers = argc > 2 ? std::atoi(argv[2]) : 32;
  constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;
  constexpr int64_t kCachesBytes = int64_t(1) << 30;
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  std::vector<uint16_t> queries;
  for (int i = 0; i < kHeads * kDim; ++i) queries.push_back(uint16_t((i * 2654435761u >> 16 & 0x8000) | 0x3800));
  const auto* q = on_card(queries);
  const auto* position = on_card(std::vector<int64_t>{tokens - 1, tokens});
  const int splits = std::max(1, 2 * processors / kKvHeads);
  auto* partials = reinterpret_cast<float*>(memory(card::DecodeScratch::bytes(kHeads, splits, kDim)));
  const card::DecodeScratch scratch{splits, partials, partials + int64_t(kHeads) * splits * kDim};
  const auto out = card::CardRow::at(memory(card::CardRow::bytes(kHeads * kDim)), kHeads * kDim);
  const auto scale = float(1 / std::sqrt(double(kDim)));
  std::printf("%lld rows, %d layers, %d pieces\n", static_cast<long long>(tokens), layers, splits);
  const auto show = [&](const char* what, int64_t bytes, const std::function<void(int)>& layer) {
    const double ms = median_ms(stream, [&] {
      for (int l = 0; l < layers; ++l) {
        layer(l);
        check(card::merge_partials(scratch, kHeads, kDim, out, stream));
      }
    });
    std::printf("%-8s %8.3f ms a step, %6.2f GB, %.2f TB/s\n", what, ms, double(bytes) * layers * 1e-9,
                double(bytes) * layers / ms * 1e-9);
  };
  const auto caches_of = [&](int64_t bytes) { return int(std::min<int64_t>(layers, kCachesBytes / bytes + 1)); };
  for (KvType type : {KvType::kF16, KvType::kQ8_0, KvType::kFp8, KvType::kQ4_0}) {
    const int64_t bytes = card::card_kv_bytes(type, kKvHeads, kDim, tokens);
    std::vector<card::CardKv> caches;
    for (int i = 0; i < caches_of(bytes); ++i) {
      caches.push_back(card::place_kv(type, kKvHeads, kDim, tokens, memory(bytes)));
      check(card::fill_rows(caches.back(), tokens, uint64_t(i) + 1, stream));
    }
    show(kv_type_name(type), bytes, [&](int l) {
      const card::AttendArgs a{q, kHeads, caches[size_t(l) % caches.size()], scale, 0.0f, 0};
      check(card::attend_token(a, {}, position, scratch, stream));
    });
    for (const card::CardKv& kv : caches) check(cudaFree(kv.k));
  }
  const card::CardKv raw = card::place_kv(KvType::kF16, kKvHeads, kDim, tokens,
                                          memory(card::card_kv_bytes(KvType::kF16, kKvHeads, kDim, tokens)));
  for (KvType type : {KvType::kKivi4, KvType::kKivi2}) {
    const int64_t step = card::old_step_bytes(type, kDim), of_head = tokens / card::kOldStep * step,
                  bytes = 2 * kKvHeads * of_head;
    std::vector<card::CardOld> caches;
    for (int i = 0; i < caches_of(bytes); ++i) {
      std::vector<card::OldHead> heads(kKvHeads);
      uint8_t* at = memory(bytes);
      for (card::OldHead& h : heads) {
        h.k = at, h.v = at + of_head, h.kept = h.channels = kDim;
        at += 2 * of_head;
      }
      caches.push_back({type, kKvHeads, kDim, 0, 0, position + 1, on_card(heads)});
      check(card::fill_rows(raw, tokens, uint64_t(i) + 1, stream));
      check(card::encode_old(caches.back(), raw, 0, tokens, stream));
    }
    show(kv_type_name(type), bytes, [&](int l) {
      const card::AttendOldArgs a{q, nullptr, kHeads, caches[size_t(l) % caches.size()], scale, 0.0f};
      check(card::attend_old(a, {}, scratch, stream));
    });
  }
  return 0;
}
