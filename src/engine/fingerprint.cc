#define XXH_INLINE_ALL
#include "engine/fingerprint.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>

namespace longkv {

namespace {

// Bytes hashed at the beginning, in the middle and at the end of each tensor.
constexpr uint64_t kSample = 4096;

class Hash {
 public:
  Hash() { XXH3_128bits_reset(&state_); }
  void add(const void* data, uint64_t n) { XXH3_128bits_update(&state_, data, size_t(n)); }
  template <class T>
  void number(T v) {
    add(&v, sizeof(v));
  }
  // With its length, so that neighbours cannot run into each other.
  void text(std::string_view s) {
    number(uint64_t(s.size()));
    add(s.data(), s.size());
  }
  std::string hex() const {
    const XXH128_hash_t h = XXH3_128bits_digest(&state_);
    return fmt::format("{:016x}{:016x}", h.high64, h.low64);
  }

 private:
  XXH3_state_t state_;
};

void add_values(Hash& hash, const Metadata& metadata, std::string_view prefix) {
  for (const auto& [key, value] : metadata.all()) {
    if (!key.starts_with(prefix)) continue;
    hash.text(key);
    hash.number(value.type);
    hash.number(value.element_type);
    hash.number(value.count);
    hash.number(uint64_t(value.bytes.size()));
    hash.add(value.bytes.data(), value.bytes.size());
  }
}

std::string hash_model(const GgufFile& file) {
  Hash hash;
  add_values(hash, file.metadata(), "");
  for (const TensorInfo& tensor : file.tensors()) {
    hash.text(tensor.name);
    hash.number(uint32_t(tensor.type));
    for (const int64_t d : tensor.dims) hash.number(d);
    const uint64_t n = std::min(kSample, tensor.bytes);
    hash.add(tensor.data, n);
    hash.add(tensor.data + (tensor.bytes - n) / 2, n);
    hash.add(tensor.data + tensor.bytes - n, n);
  }
  return hash.hex();
}

struct ModelHashes {
  std::weak_ptr<const LoadedModel> model;
  std::string file, tokenizer;
};

// Of a model that is alive, hashed once.
ModelHashes hashes_of(const std::shared_ptr<const LoadedModel>& model) {
  static std::mutex mutex;
  static std::map<const LoadedModel*, ModelHashes> known;
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.model.expired(); });
  const auto found = known.find(model.get());
  if (found != known.end()) return found->second;
  ModelHashes hashes;
  hashes.model = model;
  hashes.file = hash_model(model->file());
  Hash tokenizer;
  add_values(tokenizer, model->file().metadata(), "tokenizer.ggml.");
  hashes.tokenizer = tokenizer.hex();
  known[model.get()] = hashes;
  return hashes;
}

std::string describe(const RopeConfig& rope) {
  Hash divisors;
  divisors.add(rope.freq_divisors.data(), rope.freq_divisors.size() * sizeof(float));
  return fmt::format(
      "pairs={} dim={} base={} scaling={} factor={} original={} magnitude={} fast={} slow={} divisors={}",
      int(rope.pairs), rope.dim, rope.base, int(rope.scaling), rope.factor, rope.original_context, rope.attn_factor,
      rope.beta_fast, rope.beta_slow, rope.freq_divisors.empty() ? "none" : divisors.hex());
}

std::string hash_files(const Recipe& recipe) {
  Hash hash;
  for (const std::string& path : {recipe.mask.mask, recipe.keep.gates, recipe.index.file, recipe.prefill.file}) {
    if (path.empty()) continue;
    std::ifstream in(path, std::ios::binary);
    std::ostringstream content;
    content << in.rdbuf();
    hash.text(content.str());
  }
  return hash.hex();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// What a file says is shown only as far as it is printable and short.
std::string shown(const std::string& line) {
  std::string out;
  for (const char c : line.substr(0, 300)) out += c >= ' ' && c <= '~' ? c : '?';
  return out;
}

}  // namespace

std::string session_fingerprint(const Session& session) {
  const LoadedModel& model = session.model();
  const ModelConfig& c = model.config();
  const ModelHashes hashes = hashes_of(session.model_pointer());
  const Recipe& recipe = session.kv().recipe();
  const KvShape& shape = session.kv().cache().shape();
  Hash windows;
  for (const int64_t w : shape.window) windows.number(w);
  std::string text;
  const auto line = [&](const char* name, const std::string& value) { text += fmt::format("{}: {}\n", name, value); };
  line("model", shown(c.name));
  line("model-hash", hashes.file);
  line("tokenizer", hashes.tokenizer);
  line("rope", describe(model.rope_for(session.context())));
  line("rope-window", c.rope_window ? describe(*c.rope_window) : "none");
  line("attention", fmt::format("scale={} softcap={}", c.attn_scale, c.attn_softcap));
  line("shape", fmt::format("layers={} kv_heads={} group={} dim_k={} dim_v={} windows={}", shape.layers, shape.kv_heads,
                            shape.group_size, shape.dim_k, shape.dim_v, windows.hex()));
  line("kv", recipe.canonical());
  line("kv-files", hash_files(recipe));
  line("products", product_name(session.options().products));
  return text;
}

std::string fingerprint_difference(const std::string& file, const std::string& run) {
  const std::vector<std::string> theirs = lines_of(file), ours = lines_of(run);
  for (size_t i = 0; i < std::max(theirs.size(), ours.size()); ++i) {
    const std::string a = i < theirs.size() ? theirs[i] : "nothing", b = i < ours.size() ? ours[i] : "nothing";
    if (a != b) return fmt::format("the file has '{}', this run has '{}'", shown(a), shown(b));
  }
  return {};
}

}  // namespace longkv
