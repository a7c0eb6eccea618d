// A whole model with its KV cache on another device, behind Session.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>

#include "kv/session.h"
#include "longkv/status.h"

namespace longkv {

// Called after each piece of prompt work. `done` counts token-layers in units of tokens, so it rises evenly to `total`.
using PrefillProgress = std::function<void(int64_t done, int64_t total)>;
// Receives logits of prompt tokens [first, first + n): [n][vocab].
using LogitsSink = std::function<void(int64_t first, int64_t n, const float* logits)>;

class DeviceRunner {
 public:
  virtual ~DeviceRunner() = default;

  // As Session::prefill and Session::decode, which have checked ids and context. logits: [vocab].
  virtual Status prefill(std::span<const int32_t> ids, const PrefillProgress& progress, const std::atomic<bool>* cancel,
                         const LogitsSink& sink, int64_t sink_from, std::span<float> logits) = 0;
  virtual Status decode(int32_t id, std::span<float> logits) = 0;
  // Before a prompt: recipes whose rows a cache in memory keeps find those of all tokens there.
  virtual Status settle() { return {}; }
  // Whether the next prompt is read here; else the CPU reads it into that cache.
  virtual bool reads_prompts() const { return true; }

  virtual int64_t tokens() const = 0;
  // n is at most tokens().
  virtual Status truncate(int64_t n) = 0;
  // Into an empty sequence: rows of n tokens with random values, for measurements at depth.
  virtual Status fill_random(int64_t n, uint64_t seed) = 0;

  virtual const KvStats& stats() const = 0;
  virtual void reset_stats() = 0;
  virtual int64_t kv_bytes() const = 0;  // of the rows held
};

}  // namespace longkv
