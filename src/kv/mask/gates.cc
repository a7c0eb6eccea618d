#include "kv/mask/gates.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "base/inputs.h"
#include "gguf/writer.h"
#include "kv/mask/identity.h"

namespace longkv {

namespace {

constexpr int64_t kVersion = 1;
constexpr const char* kTensor = "kv.duo.gate";
constexpr int64_t kMaxGateBytes = int64_t{16} << 20;

// The authors' full_attention_heads.tsv: a line per layer, a gate per KV head, [layers][kv_heads].
Result<DuoGates> read_table(const std::string& path, const KvShape& shape) {
  std::ifstream file(path);
  DuoGates gates;
  int64_t bytes = 0;
  int line_number = 0, rows = 0;
  for (std::string line; std::getline(file, line);) {
    ++line_number;
    bytes += int64_t(line.size()) + 1;
    if (bytes > kMaxGateBytes) return fail(Code::kInvalidArgument, "{}: too large for a table of gates", path);
    if (line.find_first_not_of(" \t\r") == std::string::npos || line[0] == '#') continue;
    std::istringstream words(line);
    int columns = 0;
    for (std::string word; words >> word; ++columns) {
      char* end = nullptr;
      const double gate = std::strtod(word.c_str(), &end);
      if (end != word.c_str() + word.size() || !std::isfinite(gate)) {
        return fail(Code::kInvalidArgument, "{}, line {}: '{}' is not a number", path, line_number, word.substr(0, 32));
      }
      gates.values.push_back(gate);
    }
    if (columns != shape.kv_heads) {
      return fail(Code::kInvalidArgument, "{}, line {}: {} gates, the model has {} KV heads; is it another model's?",
                  path, line_number, columns, shape.kv_heads);
    }
    ++rows;
  }
  if (rows != shape.layers) {
    return fail(Code::kInvalidArgument, "{}: gates of {} layers, the model has {}; is it another model's?", path, rows,
                shape.layers);
  }
  gates.layers = shape.layers;
  gates.kv_heads = shape.kv_heads;
  return gates;
}

}  // namespace

Result<DuoGates> load_gates(const std::string& path, const KvShape& shape, const std::string& model) {
  LONGKV_TRY(check_regular(path));
  char magic[4] = {};
  std::ifstream(path, std::ios::binary).read(magic, sizeof(magic));
  if (std::memcmp(magic, "GGUF", sizeof(magic)) != 0) return read_table(path, shape);
  LONGKV_ASSIGN(const GgufFile file, GgufFile::open(path));
  LONGKV_ASSIGN(DuoGates gates, read_gates_sidecar(file));
  if (gates.layers != shape.layers || gates.kv_heads != shape.kv_heads) {
    return fail(Code::kInvalidArgument,
                "{}: gates of {} layers and {} KV heads, the model has {} and {}; is it another model's?", path,
                gates.layers, gates.kv_heads, shape.layers, shape.kv_heads);
  }
  if (const std::string differs = identity_difference(gates.model, model); !differs.empty()) {
    return fail(Code::kInvalidArgument, "{}: the file of gates {}", path, differs);
  }
  return gates;
}

bool is_gates_sidecar(const GgufFile& file) { return file.find(kTensor) != nullptr; }

Result<DuoGates> read_gates_sidecar(const GgufFile& file) {
  constexpr int64_t kMost = 1 << 20;
  const Metadata& meta = file.metadata();
  if (!meta.has("kv.duo.version"))
    return fail(Code::kCorrupt, "{}: not a file of gates: key 'kv.duo.version' is missing", file.path());
  LONGKV_ASSIGN(const int64_t version, meta.integer("kv.duo.version", 0, kMost));
  if (version != kVersion) {
    return fail(Code::kUnsupported, "{}: gates of version {}; this longkv reads version {}", file.path(), version,
                kVersion);
  }
  LONGKV_ASSIGN(const int64_t layers, meta.integer("kv.duo.layers", 1, kMost));
  LONGKV_ASSIGN(const int64_t kv_heads, meta.integer("kv.duo.kv_heads", 1, kMost));
  const TensorInfo* tensor = file.find(kTensor);
  if (tensor == nullptr || tensor->type != TensorType::kF32 || tensor->elements() != layers * kv_heads) {
    return fail(Code::kCorrupt, "{}: the tensor {} must hold {} f32 values", file.path(), kTensor, layers * kv_heads);
  }
  std::vector<float> values(size_t(layers * kv_heads));
  std::memcpy(values.data(), tensor->data, values.size() * sizeof(float));
  DuoGates gates;
  gates.layers = int(layers);
  gates.kv_heads = int(kv_heads);
  gates.values.assign(values.begin(), values.end());
  for (double gate : gates.values) {
    if (!std::isfinite(gate)) return fail(Code::kCorrupt, "{}: a gate is not finite", file.path());
  }
  LONGKV_ASSIGN(gates.sink, meta.integer_or("kv.duo.sink", 0, int64_t{1} << 40, 0));
  LONGKV_ASSIGN(gates.window, meta.integer_or("kv.duo.window", 0, int64_t{1} << 40, 0));
  LONGKV_ASSIGN(gates.model, meta.string_or("kv.duo.model", ""));
  return gates;
}

Status save_gates_sidecar(const std::string& path, const DuoGates& gates) {
  if (int64_t(gates.values.size()) != int64_t(gates.layers) * gates.kv_heads) {
    return fail(Code::kInvalidArgument, "{} gates for {} layers of {} KV heads", gates.values.size(), gates.layers,
                gates.kv_heads);
  }
  const std::vector<float> values(gates.values.begin(), gates.values.end());
  GgufWriter writer;
  LONGKV_TRY(writer.add_u32("kv.duo.version", uint32_t(kVersion)));
  LONGKV_TRY(writer.add_u32("kv.duo.layers", uint32_t(gates.layers)));
  LONGKV_TRY(writer.add_u32("kv.duo.kv_heads", uint32_t(gates.kv_heads)));
  LONGKV_TRY(writer.add_i64("kv.duo.sink", gates.sink));
  LONGKV_TRY(writer.add_i64("kv.duo.window", gates.window));
  if (!gates.model.empty()) LONGKV_TRY(writer.add_string("kv.duo.model", gates.model));
  const int64_t dims[] = {gates.kv_heads, gates.layers};
  LONGKV_TRY(writer.add_tensor(kTensor, TensorType::kF32, dims,
                               {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)}));
  return writer.write(path);
}

std::vector<bool> streaming_heads(const std::vector<double>& gates, double share) {
  // Published: gates at or above the quantile of the share keep all, after noise that parts ties.
  const auto streaming = int64_t(std::ceil(share * double(int64_t(gates.size()) - 1)));
  std::vector<size_t> order(gates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return gates[a] < gates[b]; });
  std::vector<bool> streams(gates.size(), false);
  for (int64_t i = 0; i < streaming; ++i) streams[order[size_t(i)]] = true;
  return streams;
}

std::string gates_table(const DuoGates& gates) {
  std::string text;
  for (int layer = 0; layer < gates.layers; ++layer) {
    for (int h = 0; h < gates.kv_heads; ++h) {
      text +=
          fmt::format("{}{:.6f}", h == 0 ? "" : "\t", gates.values[size_t(layer) * size_t(gates.kv_heads) + size_t(h)]);
    }
    text += "\n";
  }
  return text;
}

}  // namespace longkv
