#include "kv/mask/draw.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kv/mask/gates.h"
#include "kv/mask/leank.h"

namespace longkv {

namespace {

constexpr const char* kBars[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};

}  // namespace

bool holds_learned(const GgufFile& file) { return is_leank_sidecar(file) || is_gates_sidecar(file); }

Result<KeptShares> read_kept_shares(const GgufFile& file) {
  if (is_gates_sidecar(file)) {
    LONGKV_ASSIGN(const DuoGates gates, read_gates_sidecar(file));
    return KeptShares{"Gates of KV heads", "gate", gates.layers, gates.kv_heads, 1, gates.values};
  }
  LONGKV_ASSIGN(const LeankSidecar sidecar, read_leank_sidecar(file));
  const bool directed = std::any_of(sidecar.mask.heads.begin(), sidecar.mask.heads.end(),
                                    [](const HeadMask& head) { return head.directed(); });
  KeptShares shares{"Share of K that old rows keep",
                    directed ? "numbers of a K row" : "channels of K",
                    sidecar.layers,
                    sidecar.kv_heads,
                    sidecar.dim_k,
                    {}};
  for (const HeadMask& head : sidecar.mask.heads) shares.kept.push_back(double(head.kept(sidecar.dim_k)));
  return shares;
}

std::string draw_shares(const KeptShares& s) {
  const bool counts = s.whole > 1;
  std::string text =
      counts ? fmt::format("{} that old rows keep, of {}; a line per layer, a column per KV head\n", s.unit, s.whole)
             : std::string("gates; a line per layer, a column per KV head\n");
  double kept = 0;
  int64_t empty = 0;
  for (int layer = 0; layer < s.layers; ++layer) {
    text += fmt::format("{:>5} ", layer);
    for (int h = 0; h < s.kv_heads; ++h) {
      const double n = s.kept[size_t(layer) * size_t(s.kv_heads) + size_t(h)];
      kept += n;
      empty += n == 0;
      const auto bar = size_t(std::clamp(std::ceil(8.0 * n / double(s.whole)), 0.0, 8.0));
      text += counts ? fmt::format(" {}{:<4.0f}", kBars[bar], n) : fmt::format(" {}{:<5.2f}", kBars[bar], n);
    }
    text += "\n";
  }
  const int64_t heads = int64_t(s.layers) * s.kv_heads;
  if (!counts) return text + fmt::format("mean gate {:.3f}\n", kept / double(heads));
  return text + fmt::format("kept {:.1f}% of all; {} of {} heads keep none\n", 100.0 * kept / double(heads * s.whole),
                            empty, heads);
}

}  // namespace longkv
