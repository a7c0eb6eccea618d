// One sequence of tokens through a model: prompt reading and decoding over a KV session.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/threads.h"
#include "cuda/card_model.h"
#include "engine/device_runner.h"
#include "grad/chunk_scorer.h"
#include "kv/session.h"
#include "longkv/status.h"
#include "model/graph.h"
#include "model/model.h"

namespace longkv {

enum class PrefillOrder {
  kLayerMajor,  // all chunks through layer 0, then all through layer 1, ...
  kChunkMajor,  // one chunk through all layers, then the next
};

struct SessionOptions {
  int64_t context = 0;  // tokens that the sequence may reach; must be set
  Recipe recipe;
  ProductType products = ProductType::kInt8;
  int64_t chunk = 512;  // prompt tokens that pass a layer together; pieces begin at multiples of it
  PrefillOrder order = PrefillOrder::kLayerMajor;
  // Tokens that layers with a sliding window hold beyond it: as many can be cut from the end (prefixes that are
  // reused).
  int64_t window_slack = 0;
  // Weights on a card: the sequence runs there, KV cache and all. nullptr: on the CPU. A recipe that the card does not
  // have (cuda/card_session.h), checks, followers and second readings are refused.
  std::shared_ptr<CardModel> card = {};
  bool card_kv = true;       // the cache lies on the card too; else in memory, decoded by the CPU under any recipe
  bool card_hybrid = false;  // rows in memory, the blocks in use on the card, which chooses them; needs card_kv
  // false, with the cache in memory: the card reads prompts and the CPU does the rest, so followers, other KV sides and
  // checks work as without a card.
  bool card_decodes = true;
  // Where the rows of a cache in memory lie instead; memory holds those used lately. nullptr: in memory.
  std::shared_ptr<DiskSpace> kv_disk = {};
  int64_t card_chunk = 0;  // prompt tokens that pass a layer together on the card; 0: as memory and speed suggest
  // Instead of the recipe's keep stage, for methods that no recipe names.
  std::function<std::unique_ptr<Keeper>()> keeper = {};
  // For recipes that read the prompt again (kvzip): what stands before piece `i` when it is repeated, `before` being
  // the tokens that precede it in the prompt. Empty: an instruction to repeat, in the model's own tokens.
  std::function<std::vector<int32_t>(int64_t i, std::span<const int32_t> before)> repeat_prefix = {};
};

// Whether under this recipe a row depends on its token and those before it alone, so that any beginning of a sequence
// can be continued as if nothing had followed it: no eviction, no encoding of old rows, no sparse reading, no choice by
// the prompt's last queries.
bool keeps_prefixes(const Recipe& recipe);

class Session {
 public:
  // Errors: kInvalidArgument (context or recipe), kOutOfMemory.
  static Result<std::unique_ptr<Session>> create(std::shared_ptr<const LoadedModel> model,
                                                 const SessionOptions& options, ThreadPool& pool);

  // Reads prompt tokens after those already held. logits() then belongs to the last one. With `sink`, logits of every
  // token from `sink_from` (an index into ids) on are delivered in order; that forces chunk-major order.
  // Errors: kInvalidArgument (does not fit the context, unknown id; nothing changed), kCancelled (the sequence keeps
  // what it held before), kInternal (logits are not finite).
  Status prefill(std::span<const int32_t> ids, const PrefillProgress& progress = {},
                 const std::atomic<bool>* cancel = nullptr, const LogitsSink& sink = {}, int64_t sink_from = 0);

  // The same in pieces of work, for callers that share the machine between several sequences: start_prompt() checks
  // like prefill(), then every read_piece() passes one chunk through one layer, chunk-major, until it returns true and
  // logits() belongs to the last token. Rows and logits are those of prefill(), bit for bit.
  // Errors of read_piece(): as prefill(); drop_prompt() must follow.
  // `at_most` makes the next chunk about so short, in steps of kPieceTokens, so that a piece takes less time; it is
  // ignored where a chunk's length could change a bit: for products of floating-point weights, and for recipes to which
  // chunks matter (see keeps_prefixes()).
  static constexpr int64_t kPieceTokens = 16;
  // `sink` receives the logits of all tokens, as in prefill(), when their chunk has passed the last layer.
  Status start_prompt(std::span<const int32_t> ids, LogitsSink sink = {});
  Result<bool> read_piece(const std::atomic<bool>* cancel = nullptr, int64_t at_most = INT64_MAX);
  // Tokens of the chunk that the next piece belongs to; 0: it begins a new one.
  int64_t piece_tokens() const { return prompt_ && prompt_->layer > 0 ? prompt_->count : 0; }
  // Of a prompt under way: work done, token-layers in units of tokens.
  int64_t prompt_progress() const {
    return prompt_ ? prompt_->done + prompt_->count * prompt_->layer / model().config().layers : 0;
  }
  // Gives up a prompt that start_prompt() began. Chunks that passed all layers stay where nothing depends on the
  // prompt's end (see keeps_prefixes()); otherwise the sequence is as before, or empty where that cannot be restored.
  void drop_prompt();
  bool keeps_prefixes() const { return longkv::keeps_prefixes(kv_->recipe()); }

  // Feeds one token; logits() then predicts the next.
  Status decode(int32_t id);

  // Tokens read and decoded, in order. Random rows and exchange_kv() are not followed: compare with tokens().
  const std::vector<int32_t>& ids() const { return ids_; }
  // [vocab], of the last token fed.
  std::span<const float> logits() const { return logits_; }
  int64_t tokens() const { return kv_on_card() ? device_->tokens() : kv_->tokens().v; }
  int64_t context() const { return options_.context; }
  // Forgets all tokens from position n on.
  Status truncate(int64_t n);

  // Every n-th decoded token is also computed with full attention: captured mass and output error by layer (in the KV
  // statistics), and the KL divergence of the next token's distribution from the full one. 0 = never.
  void set_check_every(int n);
  double kl_mean() const { return kl_steps_ > 0 ? kl_sum_ / double(kl_steps_) : 0.0; }
  int64_t kl_steps() const { return kl_steps_; }
  bool last_step_checked() const { return last_checked_; }

  // A KV side of the same shape and capacity under another recipe, and putting one in place of the present one, which
  // is handed out. Tokens held are those of the KV side; logits() stays as it is until the next token.
  Result<std::unique_ptr<KvSession>> make_kv(const Recipe& recipe) const;
  void exchange_kv(std::unique_ptr<KvSession>& kv) { kv_.swap(kv); }

  // How tokens came into the cache, which decides what another prompt may take over bit for bit.
  struct Origin {
    // Leading tokens whose rows are those that reading any longer prompt at once would give: read, not decoded, and not
    // in a last piece so small that it took the kernels of single tokens.
    int64_t exact = 0;
    // The whole state is that of one prompt read at once.
    bool one_prompt = false;
    // ... will be, once the rest of that prompt is read by the next prefill().
    bool resumed = false;
  };
  const Origin& origin() const { return origin_; }
  // The largest n <= most from which reading ids of a prompt of so many tokens goes on with the bits of reading it at
  // once.
  int64_t resume_point(int64_t most, int64_t prompt) const;

  // Goes on from a state restored elsewhere: a KV side made by make_kv() with the tokens `ids`, and the logits that
  // followed them (empty: the next token gives the first ones).
  void adopt(std::unique_ptr<KvSession> kv, std::vector<int32_t> ids, std::vector<float> logits, const Origin& origin);

  ThreadPool& pool() const { return pool_; }
  // Empty while a card holds the sequence's rows.
  KvSession& kv() { return *kv_; }
  const KvSession& kv() const { return *kv_; }
  // What decoding read, wherever it runs.
  const KvStats& kv_stats() const { return kv_on_card() ? device_->stats() : kv_->stats(); }
  void reset_kv_stats();
  int64_t kv_bytes_held() const { return kv_on_card() ? device_->kv_bytes() : kv_->cache().bytes_used(); }
  // Random rows of n tokens in an empty sequence, for measurements at depth.
  Status fill_random(int64_t n, uint64_t seed);
  bool on_card() const { return device_ != nullptr; }
  // Whether the next prompt is read there: not under a KV side that was exchanged.
  bool reads_on_card() const {
    return device_ != nullptr && (options_.card_kv ? device_->reads_prompts() : kv_.get() == device_kv_);
  }
  const LoadedModel& model() const { return graph_.model(); }
  const std::shared_ptr<const LoadedModel>& model_pointer() const { return graph_.model_pointer(); }
  const SessionOptions& options() const { return options_; }

  // Bytes of hidden states held while a prompt of n tokens is read.
  static int64_t hidden_bytes(const ModelConfig& config, int64_t n);

 private:
  friend class BatchDecoder;
  Session(std::shared_ptr<const LoadedModel> model, const SessionOptions& options, std::unique_ptr<KvSession> kv,
          ThreadPool& pool);
  // Reads ids that pass through all layers before the next span starts.
  Status prefill_span(std::span<const int32_t> ids, int64_t prompt_end, bool last_span, int64_t done_before,
                      int64_t total, const PrefillProgress& progress, const std::atomic<bool>* cancel,
                      const LogitsSink& sink, int64_t sink_from);
  Status note_classes(std::span<const int32_t> ids);
  Status score_chunk(std::span<const int32_t> ids, int64_t prompt_end);
  Status repeat_prompt(std::span<const int32_t> ids, int64_t start, const std::atomic<bool>* cancel);
  bool free_pieces() const;
  bool kv_on_card() const { return device_ != nullptr && options_.card_kv; }
  Status check_logits() const { return check_logits(logits_, tokens()); }
  static Status check_logits(std::span<const float> logits, int64_t tokens);
  void note_prompt(int64_t start, int64_t end);
  void note_decoded(int64_t position, int32_t id);
  Status decode_layers(int32_t id, int64_t position);

  struct Prompt {
    std::vector<int32_t> ids;
    int64_t start = 0;   // tokens held before it
    int64_t done = 0;    // tokens of it that passed all layers
    int64_t count = 0;   // of the chunk under way
    int layer = 0;       // next of that chunk
    bool joins = false;  // its rows are those of reading the whole sequence at once
    LogitsSink sink = {};
  };
  void deliver(const LogitsSink& sink, int64_t first, int64_t n, const float* hidden);
  Status check_prompt(std::span<const int32_t> ids) const;
  int64_t cut_chunk(int64_t position, int64_t full, int64_t at_most) const;

  SessionOptions options_;
  ThreadPool& pool_;
  std::unique_ptr<KvSession> kv_;
  std::unique_ptr<DeviceRunner> device_;  // nullptr: the CPU runs the model
  const KvSession* device_kv_ = nullptr;  // that a card fills with prompts, where the cache lies in memory
  Graph graph_;
  std::vector<int32_t> ids_;
  Origin origin_;
  std::vector<float> hidden_;
  std::vector<float> logits_;
  std::vector<float> sink_logits_;
  std::vector<float> full_logits_;
  std::optional<Prompt> prompt_;           // being read in pieces
  std::vector<TokenClass> token_classes_;  // [vocab], for recipes that want them
  std::unique_ptr<ChunkScorer> scorer_;    // while a prompt is read, for recipes that want one
  int check_every_ = 0;
  int64_t decoded_ = 0;
  bool last_checked_ = false;
  double kl_sum_ = 0.0;  // nats, over kl_steps_ checked tokens
  int64_t kl_steps_ = 0;
};

}  // namespace longkv
