#include "kv/mask/draw.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace longkv {

namespace {

constexpr const char* kTensor = "kv.leank.alpha";
constexpr const char* kBars[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};

}  // namespace

bool holds_channel_mask(const GgufFile& file) { return file.find(kTensor) != nullptr; }

Result<std::string> draw_channel_mask(const GgufFile& file) {
  constexpr int64_t kMost = 1 << 20;
  const Metadata& meta = file.metadata();
  LONGKV_ASSIGN(const int64_t layers, meta.integer("kv.leank.layers", 1, kMost));
  LONGKV_ASSIGN(const int64_t heads, meta.integer("kv.leank.kv_heads", 1, kMost));
  LONGKV_ASSIGN(const int64_t dim, meta.integer("kv.leank.head_dim", 1, kMost));
  const TensorInfo* tensor = file.find(kTensor);
  if (tensor == nullptr || tensor->type != TensorType::kF32 || tensor->dims[0] != dim || tensor->dims[1] != heads ||
      tensor->dims[2] != layers || tensor->dims[3] != 1) {
    return fail(Code::kCorrupt, "{}: {} is not an f32 tensor of {} channels, {} KV heads and {} layers", file.path(),
                kTensor, dim, heads, layers);
  }
  std::vector<float> alpha(size_t(tensor->elements()));
  std::memcpy(alpha.data(), tensor->data, alpha.size() * sizeof(float));  // a file may place it at any byte
  std::string text =
      fmt::format("channels of K that old rows keep, of {}; a line per layer, a column per KV head\n", dim);
  int64_t kept = 0, empty = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    text += fmt::format("{:>5} ", layer);
    for (int64_t h = 0; h < heads; ++h) {
      int64_t n = 0;
      for (int64_t c = 0; c < dim; ++c) n += alpha[size_t((layer * heads + h) * dim + c)] != 0.0f;
      kept += n;
      empty += n == 0;
      const auto bar = size_t(std::ceil(8.0 * double(n) / double(dim)));
      text += fmt::format(" {}{:<4}", kBars[bar], n);
    }
    text += "\n";
  }
  text += fmt::format("kept {:.1f}% of all channels; {} of {} heads keep none\n",
                      100.0 * double(kept) / double(layers * heads * dim), empty, layers * heads);
  return text;
}

}  // namespace longkv
