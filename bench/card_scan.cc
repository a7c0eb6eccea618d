// Times choosing blocks on a card: a scan of one-bit keys or of boxes, then the choice, for the layers of one step.
//   card_scan [TOKENS [LAYERS]]       heads as in Llama-3.1-8B: 32 over 8, 128 channels; blocks of 16, budget 4096
// Random keys; layers in turn use four indexes, together far beyond the card's cache. Medians of 20 steps, in a graph.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "bench/card_timing.h"
#include "cuda/bits.h"
#include "cuda/select.h"

namespace {

using namespace longkv;
using namespace longkv::bench;

}  // namespace

int main(int argc, char** argv) {
  const int64_t tokens = argc > 1 ? std::atoll(argv[1]) : int64_t(1) << 20;
  const int layers = argc > 2 ? std::atoi(argv[2]) : 32;
  constexpr int kHeads = 32, kKvHeads = 8, kDim = 128, kBlock = 16, kIndexes = 4;
  const int64_t capacity = (tokens + 63) / 64 * 64, blocks = capacity / kBlock;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  const card::CardKv rows = card::place_kv(KvType::kQ8_0, kKvHeads, kDim, capacity,
                                           memory(card::card_kv_bytes(KvType::kQ8_0, kKvHeads, kDim, capacity)));
  check(card::fill_rows(rows, tokens, 1, stream));
  const int64_t bits_bytes = card::bits_bytes(kBlock, kKvHeads, kDim, blocks);
  const int64_t box_bytes = card::summary_bytes(card::SummaryKind::kBox8, kKvHeads, kDim, blocks);
  std::vector<card::CardBits> bits;
  std::vector<card::CardSummaries> boxes;
  for (int i = 0; i < kIndexes; ++i) {
    bits.push_back(card::place_bits(kBlock, kKvHeads, kDim, blocks, true, true, memory(bits_bytes)));
    boxes.push_back(card::place_summaries(card::SummaryKind::kBox8, kBlock, kKvHeads, kDim, blocks, memory(box_bytes)));
    check(card::write_bits(rows, bits.back(), 0, tokens, stream));
    check(card::summarize(rows, boxes.back(), 0, tokens / kBlock, stream));
  }
  std::vector<uint16_t> queries;
  for (int i = 0; i < kHeads * kDim; ++i) queries.push_back(uint16_t((i * 2654435761u >> 16 & 0x8000) | 0x3c00));
  auto* q = reinterpret_cast<card::half_t*>(memory(kHeads * kDim * 2));
  check(cudaMemcpy(q, queries.data(), queries.size() * 2, cudaMemcpyHostToDevice));
  auto* position = reinterpret_cast<int64_t*>(memory(16));
  const int64_t last = tokens - 1;
  check(cudaMemcpy(position, &last, 8, cudaMemcpyHostToDevice));
  const auto scratch =
      card::BitsScratch::at(memory(card::BitsScratch::bytes(kHeads, kKvHeads, kBlock, blocks)), kHeads);
  auto* scores = reinterpret_cast<float*>(memory(card::score_bytes(kKvHeads, blocks)));
  const card::ChoiceRules rules{4096, 16, 64, false, false};
  const int64_t stride = rules.tiles(kBlock);
  auto* tiles = reinterpret_cast<int32_t*>(memory(kKvHeads * (stride * 8 + 4)));
  const auto scale = float(1 / std::sqrt(double(kDim)));
  const auto score_bits = [&](int l) {
    check(
        card::score_bits(q, kHeads, rows, bits[size_t(l % kIndexes)], rules, scale, position, scratch, scores, stream));
  };
  const auto score_boxes = [&](int l) {
    check(card::score_blocks(q, kHeads, rows, boxes[size_t(l % kIndexes)], rules, position, scores, stream));
  };
  const auto choose = [&](card::Tops tops) {
    check(card::choose_blocks(scores, tops, kKvHeads, boxes[0], rules, position, tiles, tiles + kKvHeads * stride * 2,
                              stride, stream));
  };
  const auto show = [&](const char* what, int64_t bytes, const std::function<void(int)>& layer) {
    const double ms = median_ms(stream, [&] {
      for (int l = 0; l < layers; ++l) layer(l);
    });
    std::printf("%-34s %8.3f ms a step", what, ms);
    if (bytes > 0)
      std::printf(", %.2f GB, %.2f TB/s (floor at 4.8 TB/s: %.2f ms)", double(bytes) * layers * 1e-9,
                  double(bytes) * layers / ms * 1e-9, double(bytes) * layers / 4.8e9);
    std::printf("\n");
  };
  const card::Tops made = blocks > card::kFewBlocks ? card::Tops::kMade : card::Tops::kNone;
  std::printf("%lld tokens, %d layers\n", static_cast<long long>(tokens), layers);
  show("one-bit keys: scores", bits_bytes, score_bits);
  show("one-bit keys: scores and choice", bits_bytes, [&](int l) { score_bits(l), choose(card::Tops::kLeft); });
  show("choice alone", 0, [&](int) { choose(made); });
  show("boxes in bytes: scores", box_bytes, score_boxes);
  show("boxes in bytes: scores and choice", box_bytes, [&](int l) { score_boxes(l), choose(made); });
  return 0;
}
