// A model ready to run: mapped file, configuration, weights by role. Shared by sessions, and immutable from then on.
#pragma once

#include <memory>
#include <string>

#include "base/threads.h"
#include "base/virtual_array.h"
#include "gguf/gguf.h"
#include "longkv/status.h"
#include "model/config.h"
#include "model/rope.h"
#include "model/weights.h"

namespace longkv {

class LoadedModel {
 public:
  // Errors: see GgufFile::open, read_model_config, bind_weights.
  static Result<std::shared_ptr<LoadedModel>> load(const std::string& path, const RopeOverrides& overrides = {});

  // Gives every matrix whose type has one its packed form (ops/packed_rows.h), which decodes faster in the same bits,
  // and lets go of the file's pages. Before the first session. Where memory does not hold it, nothing is packed and a
  // notice says so. `layers`: only the matrices of the first so many layers, where a card has the others; -1: all.
  // Errors: a notice under --strict.
  Status pack_weights(ThreadPool& pool, int layers = -1);
  uint64_t packed_bytes() const { return packed_.size(); }

  const GgufFile& file() const { return file_; }
  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }

  // RoPE settings for a sequence of up to `context` tokens: longrope chooses its factors by that length.
  RopeConfig rope_for(int64_t context) const;

 private:
  GgufFile file_;
  ModelConfig config_;
  ModelWeights weights_;
  VirtualArray packed_;
};

}  // namespace longkv
