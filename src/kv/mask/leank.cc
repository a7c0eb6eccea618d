#include "kv/mask/leank.h"

#include <charconv>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/mapped_file.h"
#include "kv/mask/torch_zip.h"

namespace longkv {

namespace {

int64_t values_of(const KvShape& shape) { return int64_t(shape.layers) * shape.kv_heads * shape.dim_k; }

Result<std::vector<float>> read_text(const std::string& path, std::span<const uint8_t> bytes, int64_t limit) {
  std::vector<float> out;
  const char* at = reinterpret_cast<const char*>(bytes.data());
  const char* end = at + bytes.size();
  while (true) {
    while (at < end && std::strchr(" \t\r\n,", *at) != nullptr) ++at;
    if (at == end) return out;
    float value;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || int64_t(out.size()) > limit) {
      return fail(
          Code::kCorrupt,
          "{}: found '{}' after {} numbers; a channel mask is a GGUF sidecar, a tensor saved by torch.save, or text "
          "with one line of numbers per layer",
          path, std::string(at, size_t(std::min<ptrdiff_t>(end - at, 12))), out.size());
    }
    out.push_back(value);
    at = next;
  }
}

}  // namespace

Result<LeankMask> load_leank(const std::string& path, const KvShape& shape) {
  if (path.empty()) {
    return fail(Code::kInvalidArgument,
                "leank needs a channel mask learned for this model: leank:mask=FILE; without one, think (per request) "
                "or kivi4 are the nearest");
  }
  std::vector<float> alpha;
  {
    LONGKV_ASSIGN(const MappedFile file, MappedFile::open(path));
    const auto bytes = file.bytes();
    if (bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0) {
      LONGKV_ASSIGN(const GgufFile gguf, GgufFile::open(path));
      LONGKV_ASSIGN(LeankSidecar sidecar, read_leank_sidecar(gguf));
      if (sidecar.layers == shape.layers && sidecar.kv_heads == shape.kv_heads && sidecar.dim_k == shape.dim_k) {
        return std::move(sidecar.mask);
      }
      return fail(
          Code::kInvalidArgument,
          "{}: the channel mask is for {} layers, {} KV heads and {} channels, the model has {}, {} and {}; use a "
          "mask that was learned for this model",
          path, sidecar.layers, sidecar.kv_heads, sidecar.dim_k, shape.layers, shape.kv_heads, shape.dim_k);
    }
    if (is_zip(bytes)) {
      LONGKV_ASSIGN(alpha, read_torch_floats(bytes));
    } else {
      LONGKV_ASSIGN(alpha, read_text(path, bytes, values_of(shape)));
    }
  }
  if (int64_t(alpha.size()) != values_of(shape)) {
    return fail(
        Code::kInvalidArgument,
        "{}: the channel mask has {} values, the model needs {} ({} layers, {} KV heads, {} channels); use a mask "
        "that was learned for this model",
        path, alpha.size(), values_of(shape), shape.layers, shape.kv_heads, shape.dim_k);
  }
  for (size_t i = 0; i < alpha.size(); ++i) {
    if (alpha[i] >= 0.0f && alpha[i] <= 16.0f) continue;
    const size_t head = i / size_t(shape.dim_k);
    return fail(Code::kCorrupt, "{}: value {} of layer {}, KV head {}, channel {} is not a factor from 0 to 16", path,
                alpha[i], head / size_t(shape.kv_heads), head % size_t(shape.kv_heads), i % size_t(shape.dim_k));
  }
  return mask_of_factors(alpha, shape.dim_k);
}

LeankMask mask_of_factors(const std::vector<float>& factors, int64_t dim_k) {
  LeankMask mask;
  mask.heads.resize(factors.size() / size_t(dim_k));
  for (size_t h = 0; h < mask.heads.size(); ++h) {
    HeadMask& head = mask.heads[h];
    bool scaled = false;
    for (int64_t c = 0; c < dim_k; ++c) {
      const float a = factors[h * size_t(dim_k) + size_t(c)];
      if (a == 0.0f) continue;
      head.channels.push_back(uint16_t(c));
      head.alpha.push_back(a);
      scaled |= a != 1.0f;
    }
    if (!scaled) head.alpha.clear();
  }
  return mask;
}

Result<std::vector<float>> channel_factors(const LeankMask& mask, int64_t dim_k) {
  std::vector<float> out(mask.heads.size() * size_t(dim_k), 0.0f);
  for (size_t h = 0; h < mask.heads.size(); ++h) {
    const HeadMask& head = mask.heads[h];
    if (head.directed()) {
      return fail(Code::kUnsupported,
                  "a mask of directions has no channels to write in the published form; learn one with --channels");
    }
    for (size_t i = 0; i < head.channels.size(); ++i) {
      out[h * size_t(dim_k) + head.channels[i]] = head.alpha.empty() ? 1.0f : head.alpha[i];
    }
  }
  return out;
}

}  // namespace longkv
