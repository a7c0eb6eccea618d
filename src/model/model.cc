#include "model/model.h"

#include <cmath>
#include <utility>

#include "base/inputs.h"

namespace longkv {

Result<std::shared_ptr<const LoadedModel>> LoadedModel::load(const std::string& path, const RopeOverrides& overrides) {
  auto model = std::make_shared<LoadedModel>();
  LONGKV_ASSIGN(model->file_, GgufFile::open(path));
  note_input(path);
  auto config = read_model_config(model->file_, overrides);
  if (!config.ok()) return config.status().with_context(path);
  model->config_ = std::move(config).value();
  auto weights = bind_weights(model->file_, model->config_);
  if (!weights.ok()) return weights.status().with_context(path);
  model->weights_ = std::move(weights).value();
  return std::shared_ptr<const LoadedModel>(std::move(model));
}

RopeConfig LoadedModel::rope_for(int64_t context) const {
  RopeConfig rope = config_.rope;
  if (rope.scaling == RopeScaling::kLongRope) {
    const bool is_long = context > rope.original_context;
    rope.freq_divisors = is_long ? weights_.rope_factors_long : weights_.rope_factors_short;
    if (rope.attn_factor == 0.0) {
      // The magnitude that the authors of longrope use for a model stretched from its original context.
      const double stretch = double(config_.context) / double(rope.original_context);
      rope.attn_factor =
          stretch <= 1.0 ? 1.0 : std::sqrt(1.0 + std::log(stretch) / std::log(double(rope.original_context)));
    }
  } else {
    rope.freq_divisors = weights_.rope_freqs;
  }
  return rope;
}

}  // namespace longkv
