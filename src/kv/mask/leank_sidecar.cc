// Our own file of a learned mask.
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "gguf/writer.h"
#include "kv/mask/leank.h"

namespace longkv {

namespace {

constexpr int64_t kNewest = 2;
constexpr int64_t kMost = 1 << 20;
constexpr const char* kAlpha = "kv.leank.alpha";

Result<std::vector<float>> read_floats(const GgufFile& file, const char* name, int64_t values) {
  const TensorInfo* tensor = file.find(name);
  if (tensor == nullptr || tensor->type != TensorType::kF32 || tensor->elements() != values) {
    return fail(Code::kCorrupt, "{}: the tensor {} must hold {} f32 values", file.path(), name, values);
  }
  std::vector<float> out(size_t(values), 0.0f);
  std::memcpy(out.data(), tensor->data, out.size() * sizeof(float));  // a file may place it at any byte
  for (float x : out) {
    if (!std::isfinite(x)) return fail(Code::kCorrupt, "{}: {} holds a value that is not finite", file.path(), name);
  }
  return out;
}

// What version 2 has beside factors.
Status read_directions(const GgufFile& file, LeankSidecar& s) {
  const Metadata& meta = file.metadata();
  const auto heads = int64_t(s.mask.heads.size());
  LONGKV_ASSIGN(s.mask.compensate, meta.boolean("kv.leank.compensate"));
  LONGKV_ASSIGN(const std::vector<int64_t> removed, meta.integers("kv.leank.removed", heads, 0, int(RemovedAs::kDrop)));
  LONGKV_ASSIGN(const std::vector<double> scores, meta.reals("kv.leank.score", heads));
  LONGKV_ASSIGN(const std::vector<int64_t> counts, meta.integers("kv.leank.directions", heads, 0, s.dim_k));
  int64_t all = 0;
  for (int64_t n : counts) all += n * s.dim_k;
  std::vector<float> keys, queries;
  if (all > 0) {
    LONGKV_ASSIGN(keys, read_floats(file, "kv.leank.keys", all));
    LONGKV_ASSIGN(queries, read_floats(file, "kv.leank.queries", all));
  }
  int64_t at = 0;
  for (int64_t h = 0; h < heads; ++h) {
    HeadMask& head = s.mask.heads[size_t(h)];
    head.removed = RemovedAs(removed[size_t(h)]);
    if (!(std::abs(scores[size_t(h)]) < 1e4)) {
      return fail(Code::kCorrupt, "{}: a score of {} for the old rows of a head", file.path(), scores[size_t(h)]);
    }
    head.score = float(scores[size_t(h)]);
    const int64_t n = counts[size_t(h)] * s.dim_k;
    if (n > 0 && !head.channels.empty()) {
      return fail(Code::kCorrupt, "{}: layer {}, KV head {} has channels and directions", file.path(), h / s.kv_heads,
                  h % s.kv_heads);
    }
    head.keys.assign(keys.begin() + at, keys.begin() + at + n);
    head.queries.assign(queries.begin() + at, queries.begin() + at + n);
    at += n;
  }
  return {};
}

}  // namespace

bool is_leank_sidecar(const GgufFile& file) { return file.find(kAlpha) != nullptr; }

Result<LeankSidecar> read_leank_sidecar(const GgufFile& file) {
  const Metadata& meta = file.metadata();
  if (!meta.has("kv.leank.version"))
    return fail(Code::kCorrupt, "{}: not a channel mask: key 'kv.leank.version' is missing", file.path());
  LONGKV_ASSIGN(const int64_t version, meta.integer("kv.leank.version", 0, kMost));
  if (version < 1 || version > kNewest) {
    return fail(Code::kUnsupported, "{}: channel mask of version {}; this longkv reads up to version {}", file.path(),
                version, kNewest);
  }
  LONGKV_ASSIGN(const int64_t layers, meta.integer("kv.leank.layers", 1, kMost));
  LONGKV_ASSIGN(const int64_t kv_heads, meta.integer("kv.leank.kv_heads", 1, kMost));
  LONGKV_ASSIGN(const int64_t dim, meta.integer("kv.leank.head_dim", 1, 1 << 12));
  LONGKV_ASSIGN(const std::vector<float> alpha, read_floats(file, kAlpha, layers * kv_heads * dim));
  for (float a : alpha) {
    if (a < 0.0f || a > 16.0f) return fail(Code::kCorrupt, "{}: {} is not a factor from 0 to 16", file.path(), a);
  }
  LeankSidecar s{int(layers), int(kv_heads), int(dim), mask_of_factors(alpha, dim)};
  LONGKV_ASSIGN(s.mask.sink, meta.integer_or("kv.leank.sink", 0, int64_t{1} << 40, 0));
  LONGKV_ASSIGN(s.mask.window, meta.integer_or("kv.leank.window", 0, int64_t{1} << 40, 0));
  LONGKV_ASSIGN(s.mask.model, meta.string_or("kv.leank.model", ""));
  if (version >= 2) LONGKV_TRY(read_directions(file, s));
  return s;
}

Status save_leank_sidecar(const std::string& path, const KvShape& shape, const LeankMask& mask) {
  const auto heads = size_t(shape.layers) * size_t(shape.kv_heads);
  if (mask.heads.size() != heads) {
    return fail(Code::kInvalidArgument, "masks of {} heads for {} layers of {} KV heads", mask.heads.size(),
                shape.layers, shape.kv_heads);
  }
  std::vector<float> alpha(heads * size_t(shape.dim_k), 0.0f), keys, queries, scores;
  std::vector<int32_t> removed, counts;
  for (size_t h = 0; h < heads; ++h) {
    const HeadMask& head = mask.heads[h];
    for (size_t i = 0; i < head.channels.size(); ++i) {
      alpha[h * size_t(shape.dim_k) + head.channels[i]] = head.alpha.empty() ? 1.0f : head.alpha[i];
    }
    keys.insert(keys.end(), head.keys.begin(), head.keys.end());
    queries.insert(queries.end(), head.queries.begin(), head.queries.end());
    counts.push_back(head.directed() ? int32_t(head.kept(shape.dim_k)) : 0);
    removed.push_back(int32_t(head.removed));
    scores.push_back(head.score);
  }
  GgufWriter writer;
  LONGKV_TRY(writer.add_u32("kv.leank.version", uint32_t(kNewest)));
  LONGKV_TRY(writer.add_u32("kv.leank.layers", uint32_t(shape.layers)));
  LONGKV_TRY(writer.add_u32("kv.leank.kv_heads", uint32_t(shape.kv_heads)));
  LONGKV_TRY(writer.add_u32("kv.leank.head_dim", uint32_t(shape.dim_k)));
  LONGKV_TRY(writer.add_i64("kv.leank.sink", mask.sink));
  LONGKV_TRY(writer.add_i64("kv.leank.window", mask.window));
  if (!mask.model.empty()) LONGKV_TRY(writer.add_string("kv.leank.model", mask.model));
  LONGKV_TRY(writer.add_bool("kv.leank.compensate", mask.compensate));
  LONGKV_TRY(writer.add_i32s("kv.leank.removed", removed));
  LONGKV_TRY(writer.add_f32s("kv.leank.score", scores));
  LONGKV_TRY(writer.add_i32s("kv.leank.directions", counts));
  const auto add = [&](const char* name, const std::vector<float>& values, std::span<const int64_t> dims) {
    return writer.add_tensor(name, TensorType::kF32, dims,
                             {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)});
  };
  const int64_t dims[] = {shape.dim_k, shape.kv_heads, shape.layers};
  LONGKV_TRY(add(kAlpha, alpha, dims));
  const int64_t rows[] = {shape.dim_k, int64_t(keys.size()) / shape.dim_k};
  if (!keys.empty()) {
    LONGKV_TRY(add("kv.leank.keys", keys, rows));
    LONGKV_TRY(add("kv.leank.queries", queries, rows));
  }
  return writer.write(path);
}

}  // namespace longkv
