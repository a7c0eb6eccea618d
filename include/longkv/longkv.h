// longkv's public interface: a model and one sequence of tokens under a KV recipe.
//
// An Engine is not thread-safe; different engines are independent. All failures are values (longkv/status.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "longkv/status.h"

namespace longkv {

struct EngineOptions {
  std::string model_path;   // GGUF file, first shard of a split model
  std::string kv = "full";  // KV recipe, e.g. "quest:budget=2048" (docs/recipes.md)
  int threads = 0;          // 0: physical cores of one NUMA node
  int64_t context = 0;      // tokens the sequence may reach; 0: what the model was trained for
  int64_t chunk = 512;      // prompt tokens that pass a layer together
  std::string products =
      "auto";          // "int8", "f32", "bf16" or "auto" (bf16 on AMX, else int8): how weights meet activations
  bool repack = true;  // keep weights in the form that decodes fastest: same bits, a slower start
};

// llama.cpp's names and defaults; temperature 0 is greedy.
struct GenerateOptions {
  int64_t max_tokens = 128;
  float temperature = 0.8f;
  int64_t top_k = 40;
  float top_p = 0.95f;
  float min_p = 0.05f;
  float repeat_penalty = 1.0f;
  uint64_t seed = 0;
};

struct EngineStats {
  int64_t decoded_tokens = 0;
  int64_t kv_bytes = 0;     // K and V rows read by decoding, and
  int64_t index_bytes = 0;  // summaries read to choose them
};

class Engine {
 public:
  // Errors: kIo, kCorrupt, kUnsupported (the model file); kInvalidArgument (options); kOutOfMemory.
  static Result<Engine> open(const EngineOptions& options);
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  ~Engine();

  // Token ids of a text. Special tokens written in the text stay text unless `parse_special`.
  // Errors: kInvalidArgument (a text of more than 1 GiB, a byte that the vocabulary cannot write).
  Result<std::vector<int32_t>> tokenize(std::string_view text, bool add_bos, bool parse_special = false) const;
  // Bytes of the tokens; not necessarily complete UTF-8 characters.
  std::string detokenize(std::span<const int32_t> ids) const;
  int64_t vocabulary() const;

  // Reads prompt tokens after those already held. progress(done, total) in tokens. A prompt that does not fit the
  // context is an error, never cut. Setting *cancel stops within a chunk; the sequence then keeps what it held before.
  Status read(std::span<const int32_t> ids, const std::function<void(int64_t, int64_t)>& progress = {},
              const std::atomic<bool>* cancel = nullptr);

  // Generates up to max_tokens tokens after what was read, stops at the model's end-of-turn token, and hands complete
  // characters to on_text as they appear (return false to stop). Returns the ids.
  Result<std::vector<int32_t>> generate(const GenerateOptions& options,
                                        const std::function<bool(std::string_view)>& on_text = {});

  // Feeds one token. Logits of the last token fed: [vocabulary].
  Status feed(int32_t id);
  std::span<const float> logits() const;

  // Writes what the sequence holds to a KV file, which replaces `path` once it is complete; and goes on from one, with
  // the same bits. Restoring refuses a file of another model, recipe or setting, and a damaged one; the sequence then
  // keeps what it held. verify: check every byte first; else mapped rows are trusted, and a file of any size starts at
  // once.
  Status save(const std::string& path);
  Status restore(const std::string& path, bool verify = true);

  int64_t tokens() const;           // held by the sequence
  Status truncate(int64_t tokens);  // forgets everything after
  std::string recipe() const;       // canonical string
  EngineStats stats() const;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace longkv
