#include "engine/session.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "cuda/card_session.h"
#include "engine/likelihood.h"
#include "model/identity.h"
#include "ops/matmul.h"
#include "ops/matmul_bf16.h"
#include "prefill/sparse.h"
#include "tokenizer/tokenizer.h"

namespace longkv {

namespace {

// Layer-major order holds the hidden states of a whole span of the prompt. Longer prompts are read in several spans,
// so that this buffer stays small beside the cache of any model.
constexpr int64_t kHiddenBytes = int64_t(1) << 30;

int64_t span_tokens(const ModelConfig& config, int64_t chunk) {
  return std::max<int64_t>(1, kHiddenBytes / (config.dim * int64_t(sizeof(float))) / chunk) * chunk;
}

// RoPE of the model's layers for the KV side. Only frequencies are used: a table of one position has them.
KvRotate rotation(const LoadedModel& model, int64_t context) {
  struct Tables {
    RopeTable full, window;
    std::vector<int64_t> windows;
  };
  const ModelConfig& c = model.config();
  auto tables = std::make_shared<Tables>();
  tables->full = RopeTable(model.rope_for(context), 1);
  tables->window = c.rope_window ? RopeTable(*c.rope_window, 1) : tables->full;
  tables->windows = c.window;
  return [tables](int layer, double delta, float* rows, int64_t n, int64_t stride) {
    const bool windowed = !tables->windows.empty() && tables->windows[size_t(layer)] > 0;
    turn_rows(windowed ? tables->window : tables->full, delta, rows, n, stride);
  };
}

// Estimates of sparse prompt attention want more queries at a time than products of weights do.
int64_t prompt_chunk(const KvSession& kv, const SessionOptions& options) {
  return SparsePrefill::chunk_tokens(kv.recipe().prefill, options.chunk, options.context);
}

// Tokens before a repeated piece that name its place.
constexpr size_t kAnchor = 8;

// KVzip's instructions. From the second piece on they name its place by the eight tokens before it.
Result<std::function<std::vector<int32_t>(int64_t, std::span<const int32_t>)>> repeat_instructions(
    const LoadedModel& model) {
  LONGKV_ASSIGN(const Tokenizer tokenizer, Tokenizer::from_metadata(model.file().metadata()));
  const auto encode = [&](const char* text) { return tokenizer.encode(text, false, false); };
  LONGKV_ASSIGN(const std::vector<int32_t> first, encode("\n\nRepeat the previous context exactly."));
  LONGKV_ASSIGN(const std::vector<int32_t> later,
                encode("\n\nRepeat the part of the previous context exactly, starting with"));
  LONGKV_ASSIGN(const std::vector<int32_t> suffix, encode("\n"));
  return std::function<std::vector<int32_t>(int64_t, std::span<const int32_t>)>(
      [first, later, suffix](int64_t i, std::span<const int32_t> before) {
        std::vector<int32_t> ids = i == 0 ? first : later;
        if (i > 0) {
          const auto anchor = before.last(std::min(kAnchor, before.size()));
          ids.insert(ids.end(), anchor.begin(), anchor.end());
        }
        ids.insert(ids.end(), suffix.begin(), suffix.end());
        return ids;
      });
}

// Control tokens are special; tokens of ASCII punctuation alone, leading blanks aside, are punctuation.
Result<std::vector<TokenClass>> classes_of_tokens(const LoadedModel& model) {
  LONGKV_ASSIGN(const Tokenizer tokenizer, Tokenizer::from_metadata(model.file().metadata()));
  std::vector<TokenClass> classes(size_t(model.config().vocab), TokenClass::kOther);
  const int64_t known = std::min(int64_t(classes.size()), int64_t(tokenizer.vocab_size()));
  for (int64_t id = 0; id < known; ++id) {
    if (tokenizer.is_control(int32_t(id))) {
      classes[size_t(id)] = TokenClass::kSpecial;
      continue;
    }
    std::string_view text = tokenizer.piece(int32_t(id));
    while (text.starts_with(' ')) text.remove_prefix(1);
    const bool punctuation = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
      return c < 128 && std::ispunct(c) != 0;
    });
    if (punctuation) classes[size_t(id)] = TokenClass::kPunctuation;
  }
  return classes;
}

bool cancelled(const std::atomic<bool>* cancel) { return cancel != nullptr && cancel->load(std::memory_order_relaxed); }

// layers: of the model's first so many alone; -1: of all.
Result<std::unique_ptr<KvSession>> create_kv(const LoadedModel& model, const Recipe& recipe,
                                             const SessionOptions& options, ThreadPool& pool,
                                             std::unique_ptr<Keeper> keeper, int layers = -1) {
  const ModelConfig& c = model.config();
  KvShape shape = c.kv_shape();
  if (layers >= 0) {
    shape.layers = layers;
    if (!shape.window.empty()) shape.window.resize(size_t(layers));
  }
  return KvSession::create(shape, recipe, RowCapacity{options.context}, AttendParams{c.attn_scale, c.attn_softcap},
                           pool,
                           KvSessionExtras{rotation(model, options.context), std::move(keeper), model_identity(c),
                                           options.window_slack, options.kv_disk});
}

// After a prompt or a token that failed: `start` tokens again, as before it, or none where sliding windows and eviction
// have let go of rows that these need.
template <class Cut>
Status take_back(const Status& failed, int64_t start, const Cut& cut, std::vector<int32_t>& ids,
                 Session::Origin& origin) {
  origin.resumed = origin.one_prompt = false;
  if (cut(start).ok()) return failed;
  ids.clear();
  origin = {};
  LONGKV_TRY(cut(0));
  return Status(failed.code(), failed.message() + "; the sequence held before cannot be restored and is empty now");
}

}  // namespace

Session::Session(std::shared_ptr<const LoadedModel> model, const SessionOptions& options, std::unique_ptr<KvSession> kv,
                 ThreadPool& pool)
    : options_(options),
      pool_(pool),
      kv_(std::move(kv)),
      graph_(std::move(model), options.context, options.products, pool) {
  logits_.resize(size_t(graph_.model().config().vocab));
}

Result<std::unique_ptr<Session>> Session::create(std::shared_ptr<const LoadedModel> model,
                                                 const SessionOptions& options, ThreadPool& pool) {
  if (options.context < 1)
    return fail(Code::kInvalidArgument, "context of {} tokens; at least 1 is needed", options.context);
  if (options.chunk < 1) return fail(Code::kInvalidArgument, "chunk of {} tokens; at least 1 is needed", options.chunk);
  LONGKV_ASSIGN(auto kv, create_kv(*model, options.recipe, options, pool, options.keeper ? options.keeper() : nullptr));
  std::unique_ptr<Session> session(new Session(std::move(model), options, std::move(kv), pool));
  if (options.card) {
    if (options.keeper) return fail(Code::kUnsupported, "a keep stage of one's own does not run on a card");
    if (options.card_kv && !options.card_decodes)
      return fail(Code::kInternal, "a card that only reads prompts needs the cache in memory");
    CardSessionOptions card{options.context,
                            options.card_chunk,
                            options.order == PrefillOrder::kLayerMajor,
                            options.recipe,
                            options.card_kv ? nullptr : session->kv_.get(),
                            options.card_hybrid,
                            &session->graph_,
                            nullptr,
                            options.card_kv && options.recipe.keep.evicts() ? session->kv_.get() : nullptr};
    if (const int layers = options.card->host_layers(); layers > 0 && options.card_kv) {
      LONGKV_ASSIGN(card.host_kv, create_kv(session->model(), options.recipe, options, pool, nullptr, layers));
    }
    LONGKV_ASSIGN(session->device_, make_card_session(options.card, card, pool));
    session->device_kv_ = card.kv;
  }
  return session;
}

void Session::reset_kv_stats() {
  if (kv_on_card()) return device_->reset_stats();
  kv_->reset_stats();
}

Status Session::fill_random(int64_t n, uint64_t seed) {
  if (!kv_on_card()) return kv_->fill_random(n, seed);
  if (tokens() != 0 || n < 0 || n > options_.context) {
    return fail(Code::kInvalidArgument, "random rows of {} tokens go into an empty sequence of at most {}; it holds {}",
                n, options_.context, tokens());
  }
  return device_->fill_random(n, seed);
}

Result<std::unique_ptr<KvSession>> Session::make_kv(const Recipe& recipe) const {
  return create_kv(model(), recipe, options_, pool_, nullptr);
}

int64_t Session::hidden_bytes(const ModelConfig& config, int64_t n) {
  return std::min(n, span_tokens(config, 1)) * config.dim * int64_t(sizeof(float));
}

// After embed(), which refuses ids outside the vocabulary.
Status Session::note_classes(std::span<const int32_t> ids) {
  if (!kv_->wants_classes()) return {};
  if (token_classes_.empty()) {
    LONGKV_ASSIGN(token_classes_, classes_of_tokens(model()));
  }
  std::vector<TokenClass> classes;
  for (const int32_t id : ids) classes.push_back(token_classes_[size_t(id)]);
  kv_->note_classes(classes);
  return {};
}

// Before a chunk passes the layers.
Status Session::score_chunk(std::span<const int32_t> ids, int64_t prompt_end) {
  const KeepScoring scoring = kv_->scoring(prompt_end);
  if (scoring == KeepScoring::kNone) return {};
  if (!scorer_) {
    LONGKV_ASSIGN(scorer_, ChunkScorer::create(graph_.model_pointer(), options_.context, options_.products, pool_));
  }
  kv_->prepare_scores();
  std::vector<KeepScore> scores;
  LONGKV_TRY(scorer_->run(kv_->cache(), ids, scoring, scores));
  return kv_->take_scores(std::move(scores));
}

Status Session::check_logits(std::span<const float> logits, int64_t tokens) {
  // Every token reads all of them: a count without an early exit is vectorised.
  int64_t bad = 0;
  for (float v : logits) bad += !(std::abs(v) <= std::numeric_limits<float>::max());
  if (bad > 0) {
    return fail(Code::kInternal,
                "the model produced {} logits that are not finite numbers after {} tokens; its weights may be damaged",
                bad, tokens);
  }
  return {};
}

Status Session::check_prompt(std::span<const int32_t> ids) const {
  const int64_t n = int64_t(ids.size()), start = tokens();
  if (start + n > options_.context) {
    return fail(Code::kInvalidArgument, "{} tokens are held and {} more do not fit the context of {}", start, n,
                options_.context);
  }
  if (const int64_t piece = std::min(n, kv_->repeat_chunk()); start + n + piece > options_.context) {
    return fail(
        Code::kInvalidArgument,
        "{} tokens and a piece of {} that this recipe reads again after them do not fit the context of {}; raise "
        "it, or read smaller pieces (kvzip:chunk={})",
        start + n, piece, options_.context, std::max<int64_t>(1, piece / 4));
  }
  const int64_t vocab = model().config().vocab;
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab) {
      return fail(Code::kInvalidArgument, "token id {} is outside the vocabulary of {}", id, vocab);
    }
  }
  return {};
}

Status Session::prefill(std::span<const int32_t> ids, const PrefillProgress& progress, const std::atomic<bool>* cancel,
                        const LogitsSink& sink, int64_t sink_from) {
  const int64_t n = int64_t(ids.size());
  if (n == 0) return {};
  const int64_t start = tokens();
  LONGKV_TRY(check_prompt(ids));
  const ModelConfig& c = model().config();
  if (kv_on_card()) LONGKV_TRY(device_->settle());
  if (reads_on_card()) {
    const Status read = device_->prefill(ids, progress, cancel, sink, sink_from, logits_);
    ids_.resize(std::min(ids_.size(), size_t(tokens())));
    LONGKV_TRY(read);
    ids_.resize(size_t(start));
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    return check_logits();
  }
  const bool chunk_major = options_.order == PrefillOrder::kChunkMajor || sink || kv_->scoring() != KeepScoring::kNone;
  const int64_t chunk = prompt_chunk(*kv_, options_);
  const int64_t span = chunk_major ? chunk : span_tokens(c, chunk);
  // Spans and pieces begin at multiples of their length in the sequence, wherever reading begins: a prompt whose
  // beginning is taken from elsewhere is cut in the same places.
  int64_t last = 0;  // index of the last token within its span
  for (int64_t begin = 0, count = 0; begin < n; begin += count) {
    count = std::min(span - (start + begin) % span, n - begin);
    last = count - 1;
    const Status s = prefill_span(ids.subspan(size_t(begin), size_t(count)), start + n, begin + count == n, begin, n,
                                  progress, cancel, sink, sink_from);
    if (!s.ok()) {
      scorer_.reset();
      return take_back(
          s, start, [&](int64_t held) { return kv_->truncate(TokenCount{held}); }, ids_, origin_);
    }
  }
  scorer_.reset();
  // Only the last row reaches the output matrix.
  graph_.logits(hidden_.data() + last * c.dim, 1, logits_.data());
  LONGKV_TRY(check_logits());
  ids_.resize(size_t(start));
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  note_prompt(start, start + n);
  if (kv_->repeat_chunk() == 0) return {};
  Status repeated = repeat_prompt(ids, start, cancel);
  if (!repeated.ok()) LONGKV_TRY(truncate(start));
  return repeated;
}

// Reads the prompt again, piece by piece, so that the keep stage can score its rows; then rows are dropped.
Status Session::repeat_prompt(std::span<const int32_t> ids, int64_t start, const std::atomic<bool>* cancel) {
  if (!options_.repeat_prefix) {
    LONGKV_ASSIGN(options_.repeat_prefix, repeat_instructions(model()));
  }
  const int64_t n = int64_t(ids.size()), chunk = kv_->repeat_chunk();
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const int64_t end = std::min(n, begin + chunk);
    std::vector<int32_t> input = options_.repeat_prefix(begin / chunk, ids.first(size_t(begin)));
    input.insert(input.end(), ids.begin() + begin, ids.begin() + end);
    const int64_t room = options_.context - tokens();
    if (int64_t(input.size()) > room) {
      return fail(
          Code::kInvalidArgument,
          "this recipe reads the prompt again in pieces of {} tokens after it, {} with the instruction; the context "
          "of {} has room for {} more: raise it, or read smaller pieces (kvzip:chunk={})",
          chunk, input.size(), options_.context, room, std::max<int64_t>(1, chunk / 4));
    }
    kv_->begin_repeat(start, {start + begin, start + end});
    LONGKV_TRY(prefill_span(input, tokens() + int64_t(input.size()), false, 0, n, {}, cancel, {}, 0));
    LONGKV_TRY(kv_->end_repeat());
  }
  return kv_->finish_repeats();
}

Status Session::prefill_span(std::span<const int32_t> ids, int64_t prompt_end, bool last_span, int64_t done_before,
                             int64_t total, const PrefillProgress& progress, const std::atomic<bool>* cancel,
                             const LogitsSink& sink, int64_t sink_from) {
  const ModelConfig& c = model().config();
  const int64_t n = int64_t(ids.size());
  const int64_t start = tokens();
  const int64_t chunk = prompt_chunk(*kv_, options_);
  if (hidden_.size() < size_t(n * c.dim)) hidden_.resize(size_t(n * c.dim));
  LONGKV_TRY(graph_.embed(ids.data(), n, hidden_.data()));
  LONGKV_TRY(note_classes(ids));
  LONGKV_TRY(score_chunk(ids, prompt_end));
  int64_t token_layers = 0;
  for (int layer = 0; layer < c.layers; ++layer) {
    for (int64_t begin = 0, count = 0; begin < n; begin += count) {
      count = std::min(chunk - (start + begin) % chunk, n - begin);
      LONGKV_TRY(
          graph_.prefill_layer(layer, *kv_, hidden_.data() + begin * c.dim, count, start + begin, prompt_end, cancel));
      if (cancelled(cancel)) return fail(Code::kCancelled, "interrupted while the prompt was read");
      token_layers += count;
      if (progress) progress(done_before + token_layers / c.layers, total);
    }
    if (last_span) LONGKV_TRY(kv_->finish_prefill(layer));
  }
  if (sink && done_before + n > sink_from) {
    const int64_t first = std::max<int64_t>(sink_from - done_before, 0);
    deliver(sink, done_before + first, n - first, hidden_.data() + first * c.dim);
  }
  return {};
}

// Logits of n tokens to the sink, a few at a time.
void Session::deliver(const LogitsSink& sink, int64_t first, int64_t n, const float* hidden) {
  constexpr int64_t kLogitRows = 64;
  const ModelConfig& c = model().config();
  sink_logits_.resize(size_t(kLogitRows * c.vocab));
  for (int64_t t = 0; t < n; t += kLogitRows) {
    const int64_t count = std::min(kLogitRows, n - t);
    graph_.logits(hidden + t * c.dim, count, sink_logits_.data());
    sink(first + t, count, sink_logits_.data());
  }
}

Status Session::decode(int32_t id) {
  const int64_t position = tokens();
  if (position >= options_.context) {
    return fail(Code::kInvalidArgument, "the context of {} tokens is full", options_.context);
  }
  const ModelConfig& c = model().config();
  // Some layers hold the token already.
  const auto undo = [&](const Status& failed) {
    const auto cut = [&](int64_t n) { return kv_on_card() ? device_->truncate(n) : kv_->truncate(TokenCount{n}); };
    return take_back(failed, position, cut, ids_, origin_);
  };
  if (device_ && options_.card_decodes) {
    if (id < 0 || id >= c.vocab)
      return fail(Code::kInvalidArgument, "token id {} is outside the vocabulary of {}", id, c.vocab);
    if (const Status decoded = device_->decode(id, logits_); !decoded.ok()) return undo(decoded);
    ids_.resize(size_t(position));
    ids_.push_back(id);
    return check_logits();
  }
  last_checked_ = check_every_ > 0 && decoded_ % check_every_ == 0;
  ++decoded_;
  if (last_checked_) {
    kv_->begin_probe();
    const Status probed = decode_layers(id, position);
    LONGKV_TRY(kv_->end_probe());
    LONGKV_TRY(probed);
    full_logits_ = logits_;
  }
  if (Status decoded = decode_layers(id, position); !decoded.ok()) {
    return kv_->cache().tokens(0).v > position ? undo(decoded) : decoded;
  }
  note_decoded(position, id);
  if (last_checked_) {
    kl_sum_ += kl_divergence(full_logits_.data(), logits_.data(), c.vocab);
    ++kl_steps_;
  }
  return check_logits();
}

void Session::note_decoded(int64_t position, int32_t id) {
  ids_.resize(size_t(position));
  ids_.push_back(id);
  origin_.one_prompt = origin_.resumed = false;
}

Status Session::decode_layers(int32_t id, int64_t position) {
  const ModelConfig& c = model().config();
  if (hidden_.size() < size_t(c.dim)) hidden_.resize(size_t(c.dim));
  LONGKV_TRY(graph_.embed(&id, 1, hidden_.data()));
  LONGKV_TRY(note_classes({&id, 1}));
  for (int layer = 0; layer < c.layers; ++layer) LONGKV_TRY(graph_.decode_layer(layer, *kv_, hidden_.data(), position));
  graph_.logits(hidden_.data(), 1, logits_.data());
  return {};
}

void Session::set_check_every(int n) {
  check_every_ = n;
  kv_->set_check_every(n);
}

Status Session::truncate(int64_t n) {
  if (n < 0 || n > tokens()) return fail(Code::kInvalidArgument, "cannot cut to {} tokens, {} are held", n, tokens());
  if (n == tokens()) return {};
  LONGKV_TRY(kv_on_card() ? device_->truncate(n) : kv_->truncate(TokenCount{n}));
  ids_.resize(std::min(ids_.size(), size_t(n)));
  origin_ = {std::min(origin_.exact, n), false, false};
  return {};
}

// Whether a token's products are the same bits in a piece of any length above kFewTokens: int8 sums are, and bf16 ones
// on AMX; other sums in floating point may be added in another order.
bool Session::free_pieces() const {
  if (options_.products == ProductType::kBf16) return bf16_by_token();
  if (options_.products != ProductType::kInt8) return false;
  const auto& tensors = model().file().tensors();
  return std::none_of(tensors.begin(), tensors.end(), [](const TensorInfo& t) {
    const bool real = t.type == TensorType::kF32 || t.type == TensorType::kF16 || t.type == TensorType::kBF16;
    return real && t.n_dims > 1 && t.name.starts_with("blk.");
  });
}

// A prompt [start, end) was read.
void Session::note_prompt(int64_t start, int64_t end) {
  const int64_t chunk = prompt_chunk(*kv_, options_);
  origin_.one_prompt = start == 0 || origin_.resumed;
  origin_.resumed = false;
  const bool joins = origin_.exact == start && resume_point(start, end) == start;
  if (!joins) return;
  // A last piece of few tokens took other kernels than it would inside of a longer prompt.
  const int64_t piece = end / chunk * chunk;
  const bool few = end > piece && (end - piece <= kFewTokens || !free_pieces());
  origin_.exact = std::max(start, few ? piece : end);
}

int64_t Session::resume_point(int64_t most, int64_t prompt) const {
  const int64_t chunk = prompt_chunk(*kv_, options_);
  const int64_t piece = most / chunk * chunk, end = std::min(prompt, piece + chunk);
  if (!free_pieces() || end - piece <= kFewTokens) return piece;
  return std::max(piece, std::min(most, end - kFewTokens - 1));
}

void Session::adopt(std::unique_ptr<KvSession> kv, std::vector<int32_t> ids, std::vector<float> logits,
                    const Origin& origin) {
  kv_ = std::move(kv);
  kv_->set_check_every(check_every_);
  ids_ = std::move(ids);
  origin_ = origin;
  if (!logits.empty()) logits_ = std::move(logits);
}

}  // namespace longkv
