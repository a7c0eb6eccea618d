#include "kv/mask/leank.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/mapped_file.h"
#include "gguf/gguf.h"
#include "gguf/writer.h"
#include "kv/mask/torch_zip.h"

namespace longkv {

namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kMost = 1 << 20;

int64_t values_of(const KvShape& shape) { return int64_t(shape.layers) * shape.kv_heads * shape.dim_k; }

Result<std::vector<float>> read_sidecar(const std::string& path, const KvShape& shape, LeankMask& mask) {
  LONGKV_ASSIGN(const GgufFile file, GgufFile::open(path));
  const Metadata& meta = file.metadata();
  LONGKV_ASSIGN(const int64_t version, meta.integer("kv.leank.version", 0, kMost));
  if (version != kVersion) {
    return fail(Code::kUnsupported, "{}: channel mask of version {}; this longkv reads version {}", path, version,
                kVersion);
  }
  LONGKV_ASSIGN(const int64_t layers, meta.integer("kv.leank.layers", 1, kMost));
  LONGKV_ASSIGN(const int64_t heads, meta.integer("kv.leank.kv_heads", 1, kMost));
  LONGKV_ASSIGN(const int64_t dim, meta.integer("kv.leank.head_dim", 1, kMost));
  if (layers != shape.layers || heads != shape.kv_heads || dim != shape.dim_k) {
    return fail(
        Code::kInvalidArgument,
        "{}: the channel mask is for {} layers, {} KV heads and {} channels, the model has {}, {} and {}; use a "
        "mask that was learned for this model",
        path, layers, heads, dim, shape.layers, shape.kv_heads, shape.dim_k);
  }
  LONGKV_ASSIGN(mask.sink, meta.integer_or("kv.leank.sink", 0, int64_t{1} << 40, 0));
  LONGKV_ASSIGN(mask.window, meta.integer_or("kv.leank.window", 0, int64_t{1} << 40, 0));
  LONGKV_ASSIGN(mask.model, meta.string_or("kv.leank.model", ""));
  const TensorInfo* alpha = file.find("kv.leank.alpha");
  if (alpha == nullptr || alpha->type != TensorType::kF32 || alpha->elements() != values_of(shape)) {
    return fail(Code::kCorrupt, "{}: the tensor kv.leank.alpha must hold {} f32 values", path, values_of(shape));
  }
  std::vector<float> out(static_cast<size_t>(alpha->elements()));
  std::memcpy(out.data(), alpha->data, out.size() * sizeof(float));
  return out;
}

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
  LeankMask mask;
  std::vector<float> alpha;
  {
    LONGKV_ASSIGN(const MappedFile file, MappedFile::open(path));
    const auto bytes = file.bytes();
    if (bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0) {
      LONGKV_ASSIGN(alpha, read_sidecar(path, shape, mask));
    } else if (is_zip(bytes)) {
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
  mask.heads.resize(size_t(shape.layers) * size_t(shape.kv_heads));
  for (size_t h = 0; h < mask.heads.size(); ++h) {
    HeadMask& head = mask.heads[h];
    bool scaled = false;
    for (int c = 0; c < shape.dim_k; ++c) {
      const float a = alpha[h * size_t(shape.dim_k) + size_t(c)];
      if (!(a >= 0.0f && a <= 16.0f)) {
        return fail(Code::kCorrupt, "{}: value {} of layer {}, KV head {}, channel {} is not a factor from 0 to 16",
                    path, a, h / size_t(shape.kv_heads), h % size_t(shape.kv_heads), c);
      }
      if (a == 0.0f) continue;
      head.channels.push_back(uint16_t(c));
      head.alpha.push_back(a);
      scaled |= a != 1.0f;
    }
    if (!scaled) head.alpha.clear();
  }
  return mask;
}

Status save_leank(const std::string& path, const KvShape& shape, const std::vector<float>& alpha, int64_t sink,
                  int64_t window, const std::string& model) {
  if (int64_t(alpha.size()) != values_of(shape)) {
    return fail(Code::kInvalidArgument, "{} factors for {} layers, {} KV heads and {} channels", alpha.size(),
                shape.layers, shape.kv_heads, shape.dim_k);
  }
  GgufWriter writer;
  LONGKV_TRY(writer.add_u32("kv.leank.version", uint32_t(kVersion)));
  LONGKV_TRY(writer.add_u32("kv.leank.layers", uint32_t(shape.layers)));
  LONGKV_TRY(writer.add_u32("kv.leank.kv_heads", uint32_t(shape.kv_heads)));
  LONGKV_TRY(writer.add_u32("kv.leank.head_dim", uint32_t(shape.dim_k)));
  LONGKV_TRY(writer.add_i64("kv.leank.sink", sink));
  LONGKV_TRY(writer.add_i64("kv.leank.window", window));
  if (!model.empty()) LONGKV_TRY(writer.add_string("kv.leank.model", model));
  const int64_t dims[] = {shape.dim_k, shape.kv_heads, shape.layers};
  LONGKV_TRY(writer.add_tensor("kv.leank.alpha", TensorType::kF32, dims,
                               {reinterpret_cast<const uint8_t*>(alpha.data()), alpha.size() * sizeof(float)}));
  return writer.write(path);
}

}  // namespace longkv
