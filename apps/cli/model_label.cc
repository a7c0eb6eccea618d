#include "model_label.h"

#include <fmt/format.h>

#include <map>

namespace longkv::cli {

uint64_t model_parameters(const LoadedModel& model) {
  uint64_t n = 0;
  for (const TensorInfo& t : model.file().tensors()) n += uint64_t(t.elements());
  return n;
}

uint64_t model_bytes(const LoadedModel& model) {
  uint64_t n = 0;
  for (const TensorInfo& t : model.file().tensors()) n += t.bytes;
  return n;
}

std::string model_label(const LoadedModel& model) {
  // Most tensors, not most bytes: a small model's embedding outweighs its layers.
  std::map<TensorType, int> matrices;
  for (const TensorInfo& t : model.file().tensors()) {
    if (t.n_dims >= 2) ++matrices[t.type];
  }
  TensorType most = TensorType::kF32;
  int count = 0;
  for (const auto& [type, n] : matrices) {
    if (n > count) most = type, count = n;
  }
  const double millions = double(model_parameters(model)) / 1e6;
  const std::string size =
      millions >= 1000 ? fmt::format("{:.1f}B", millions / 1000) : fmt::format("{:.0f}M", millions);
  return fmt::format("{} {} {}", model.config().family, size, tensor_type_info(most)->name);
}

}  // namespace longkv::cli
