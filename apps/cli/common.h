// What several subcommands share: exit codes, common options, opening a model, reading prompt text.
#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "engine/session.h"
#include "kv/recipe.h"
#include "longkv/status.h"
#include "model/model.h"
#include "tokenizer/tokenizer.h"

namespace longkv::cli {

// Prints "error: ..." to standard error; 2 for usage (kInvalidArgument), 1 otherwise, 0 for an ok status.
int report(const Status& status);

// Options that mean the same in every command that runs a model.
struct ModelOptions {
  std::string model;
  int threads = 0;      // 0: physical cores of one NUMA node
  std::string context;  // tokens with K, M; empty: what fits, at most the trained length
  std::optional<int64_t> chunk;
  std::optional<std::string> kv;  // absent: full
  std::string kv_config;          // KTransformers config.yaml
  std::string type_k, type_v;     // override the recipe's store
  std::string prefill_type = "auto";
  std::string prefill_order = "layer";
  std::string flash_attn, batch;  // accepted for llama.cpp's users; they have no counterpart
  std::string rope_scaling;
  std::optional<double> rope_scale, rope_base;
  std::optional<int64_t> yarn_original_context;
  std::string gpu_layers;     // -ngl: a number, "auto" or "all"; empty: auto
  std::string device;         // "none", "cuda0", ...; empty: the first card
  std::string kv_place;       // "gpu", "cpu", "hybrid" or "disk"; empty: where the weights are
  std::string kv_dir;         // folder of a cache on disk; empty: TMPDIR, else /var/tmp
  bool can_use_disk = false;  // set by commands whose sequences make_session() opens
  std::string vram;           // bytes of a card that may be used; empty: what is free
  bool no_repack = false;     // weights are read as they lie in the file
  bool can_use_card = false;  // set by commands whose work a card can do
  bool card_reads = false;    // ... of which a card only reads prompts
  int64_t learn_chunk = 0;    // ... and learns from chunks of so many tokens; nothing is decoded
  bool plans_card = false;    // ... which shows what would go to a card and runs nothing
  int64_t card_context = 0;   // tokens that a card is planned for; 0: the context
};
// Options of every command: --isa, --strict, -v, --json.
struct GlobalOptions {
  std::string isa;
  bool strict = false;
  bool verbose = false;
  bool quiet = false;
  bool json = false;
};

void add_global_options(CLI::App& command, GlobalOptions& options);
void add_model_options(CLI::App& command, ModelOptions& options, bool with_recipe);

// Applies --isa (or LONGKV_ISA), --strict and verbosity. Call first.
Status apply_global_options(const GlobalOptions& options);

// A model opened with its recipe; the pool outlives everything that uses it.
struct Opened {
  std::unique_ptr<ThreadPool> pool;
  std::shared_ptr<const LoadedModel> model;
  Recipe recipe;
  ProductType products = ProductType::kInt8;
  PrefillOrder order = PrefillOrder::kLayerMajor;
  int64_t context = 0;              // tokens; resolved
  int64_t asked_context = 0;        // by the command line or the --kv-config file; 0: by neither
  int64_t chunk = 0;                // prompt tokens that pass a layer together; resolved
  std::shared_ptr<CardModel> card;  // nullptr: the CPU runs the model
  bool card_kv = true;              // the KV cache lies on the card too
  bool card_hybrid = false;         // ... but for rows of layers that choose blocks, which lie in memory
  bool card_decodes = true;         // false: it reads prompts, the CPU decodes
  bool card_asked = false;          // by the command line: then nothing falls back to the CPU
  int64_t card_chunk = 0;           // 0: as memory and speed suggest
  std::string kv_dir;               // of a cache on disk; empty: in memory
  int64_t disk_bytes = 0;           // free there
  // Rows of all tokens lie in memory, whether or not the card has some too.
  bool rows_in_memory() const { return !card || !card_kv || recipe.keep.evicts(); }
};
// What the command line says holds against a --kv-config file, with a notice; everything else comes from the file.
// Refuses a context that does not fit into memory, unless `must_fit` is false; without -c it is the largest that fits.
Result<Opened> open_model(const ModelOptions& options, bool must_fit = true);
// A session of opened.context tokens, or of `context`. On the card if one was chosen; a sequence that does not fit
// there runs on the CPU with a line that says so, unless the card was asked for.
Result<std::unique_ptr<Session>> make_session(const Opened& opened, int64_t context = 0);

// The tokenizer of a model file. Errors name the file.
Result<Tokenizer> tokenizer_of(const GgufFile& file, std::string_view override_pre = {});

// Outputs of one run, by the options that name them. Error kInvalidArgument if two of them are the same file: only the
// last would be left.
Status check_outputs_differ(const std::vector<std::pair<const char*, std::string>>& outputs);

// Bytes/s that the pool's threads read from memory, measured now; 0 when there is no memory to measure with, or when
// `cancel` is set before the figure is there.
double read_bandwidth(ThreadPool& pool, const std::atomic<bool>* cancel = nullptr);

// "128K" -> 131072. K, M, G are powers of two. Errors: kInvalidArgument naming the option.
Result<int64_t> parse_size(const std::string& text, const std::string& option);

// Whole file ("-" = standard input). Errors: kIo, kInvalidArgument when larger than `limit` bytes. `until_zero`: no
// more is read once a zero byte was found, as one is soon in what has no end.
Result<std::string> read_file(const std::string& path, uint64_t limit = uint64_t(1) << 32, bool until_zero = false);
// The same for a text that must be UTF-8, short enough to be tokenized, and not empty unless it may be. Errors: also
// kInvalidArgument.
Result<std::string> read_text_file(const std::string& path, bool may_be_empty = false);
// kInvalidArgument with the offset of the first bad byte when `text` is not UTF-8 or holds a zero byte.
Status check_utf8(const std::string& text, const std::string& what);

}  // namespace longkv::cli
