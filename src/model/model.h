// A model ready to run: mapped file, configuration, weights by role. Immutable, shared by sessions.
#pragma once

#include <memory>
#include <string>

#include "gguf/gguf.h"
#include "longkv/status.h"
#include "model/config.h"
#include "model/rope.h"
#include "model/weights.h"

namespace longkv {

class LoadedModel {
 public:
  // Errors: see GgufFile::open, read_model_config, bind_weights.
  static Result<std::shared_ptr<const LoadedModel>> load(const std::string& path, const RopeOverrides& overrides = {});

  const GgufFile& file() const { return file_; }
  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }

  // RoPE settings for a sequence of up to `context` tokens: longrope chooses its factors by that length.
  RopeConfig rope_for(int64_t context) const;

 private:
  GgufFile file_;
  ModelConfig config_;
  ModelWeights weights_;
};

}  // namespace longkv
