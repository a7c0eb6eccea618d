#include "model/model.h"

#include <cmath>
#include <utility>

#include "base/checked.h"
#include "base/inputs.h"
#include "base/log.h"
#include "kv/plan.h"
#include "ops/packed_rows.h"

namespace longkv {

Result<std::shared_ptr<LoadedModel>> LoadedModel::load(const std::string& path, const RopeOverrides& overrides) {
  auto model = std::make_shared<LoadedModel>();
  LONGKV_ASSIGN(model->file_, GgufFile::open(path));
  note_input(path);
  auto config = read_model_config(model->file_, overrides);
  if (!config.ok()) return config.status().with_context(path);
  model->config_ = std::move(config).value();
  auto weights = bind_weights(model->file_, model->config_);
  if (!weights.ok()) return weights.status().with_context(path);
  model->weights_ = std::move(weights).value();
  return model;
}

Status LoadedModel::pack_weights(ThreadPool& pool, int layers) {
  constexpr uint64_t kAlign = 64;
  const auto padded = [](const Weight& w) { return ceil_div(uint64_t(longkv::packed_bytes(w)), kAlign) * kAlign; };
  std::vector<Weight*> chosen;
  uint64_t bytes = 0;
  for (Weight* w : weights_.products(layers)) {
    if (w->packed != nullptr || !reads_packed(w->type)) continue;
    chosen.push_back(w);
    bytes += padded(*w);
  }
  if (chosen.empty()) return {};
  if (const int64_t available = available_ram_bytes(); available > 0 && bytes > uint64_t(available)) {
    return notice(fmt::format(
        "weights stay in the file's layout, which decodes more slowly: packing takes {} MiB, {} are available",
        bytes >> 20, available >> 20));
  }
  auto memory = VirtualArray::reserve(bytes);
  if (!memory.ok())
    return notice("weights stay in the file's layout, which decodes more slowly: " + memory.status().message());
  packed_ = std::move(memory).value();
  packed_.advise_huge(bytes);
  uint8_t* out = packed_.data();
  for (Weight* w : chosen) {
    pack_rows(*w, out, pool);
    release_file_pages(w->data, uint64_t(w->rows) * uint64_t(w->row_bytes));
    w->packed = out;
    out += padded(*w);
  }
  return {};
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
