// The public interface over model, tokenizer, session and sampler.
#include <utility>

#include "base/cpu.h"
#include "base/error.h"
#include "engine/kv_file.h"
#include "engine/session.h"
#include "kv/recipe.h"
#include "longkv/longkv.h"
#include "sample/sampler.h"
#include "tokenizer/stream_decoder.h"
#include "tokenizer/tokenizer.h"

namespace longkv {

struct Engine::Impl {
  std::unique_ptr<ThreadPool> pool;  // outlives the session
  std::shared_ptr<const LoadedModel> model;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<Session> session;
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Result<Engine> Engine::open(const EngineOptions& o) {
  if (o.threads < 0 || o.threads > 4096)
    return fail(Code::kInvalidArgument, "{} threads; 0 to 4096 are possible", o.threads);
  SessionOptions s;
  LONGKV_ASSIGN(s.recipe, parse_recipe(o.kv));
  if (o.products == "auto") {
    s.products = default_products();
  } else if (o.products == "f32") {
    s.products = ProductType::kF32;
  } else if (o.products == "bf16") {
    s.products = ProductType::kBf16;
  } else if (o.products != "int8") {
    return fail(Code::kInvalidArgument, "products '{}' are not known; known are auto, int8, f32, bf16", o.products);
  }
  auto impl = std::make_unique<Impl>();
  LONGKV_ASSIGN(const std::shared_ptr<LoadedModel> model, LoadedModel::load(o.model_path));
  impl->model = model;
  LONGKV_ASSIGN(impl->tokenizer, Tokenizer::from_metadata(impl->model->file().metadata()));
  impl->pool = std::make_unique<ThreadPool>(o.threads > 0 ? o.threads : default_threads());
  if (s.products != ProductType::kF32 && o.repack) LONGKV_TRY(model->pack_weights(*impl->pool));
  s.context = o.context > 0 ? o.context : impl->model->config().context;
  s.chunk = o.chunk;
  LONGKV_ASSIGN(impl->session, Session::create(impl->model, s, *impl->pool));
  return Engine(std::move(impl));
}

Result<std::vector<int32_t>> Engine::tokenize(std::string_view text, bool add_bos, bool parse_special) const {
  return impl_->tokenizer->encode(text, add_bos, parse_special);
}

std::string Engine::detokenize(std::span<const int32_t> ids) const { return impl_->tokenizer->decode(ids); }
int64_t Engine::vocabulary() const { return impl_->model->config().vocab; }

Status Engine::read(std::span<const int32_t> ids, const std::function<void(int64_t, int64_t)>& progress,
                    const std::atomic<bool>* cancel) {
  return impl_->session->prefill(ids, progress, cancel);
}

Result<std::vector<int32_t>> Engine::generate(const GenerateOptions& o,
                                              const std::function<bool(std::string_view)>& on_text) {
  if (tokens() == 0)
    return fail(Code::kInvalidArgument, "nothing was read yet: call read() with at least one token first");
  SamplingParams p;
  p.temperature = o.temperature;
  p.top_k = o.top_k;
  p.top_p = o.top_p;
  p.min_p = o.min_p;
  p.repeat_penalty = o.repeat_penalty;
  p.seed = o.seed;
  LONGKV_TRY(validate(p));
  Sampler sampler(p);
  StreamDecoder decoder;
  std::vector<int32_t> ids;
  auto emit = [&](std::string_view text) { return text.empty() || !on_text || on_text(text); };
  while (int64_t(ids.size()) < o.max_tokens) {
    const int32_t id = sampler.sample(logits());
    sampler.accept(id);
    if (impl_->tokenizer->is_eog(id)) break;
    ids.push_back(id);
    const bool go_on = impl_->tokenizer->is_control(id) || emit(decoder.push(impl_->tokenizer->piece(id)));
    if (tokens() >= impl_->session->context()) break;
    LONGKV_TRY(feed(id));
    if (!go_on) break;
  }
  emit(decoder.flush());
  return ids;
}

Status Engine::feed(int32_t id) { return impl_->session->decode(id); }
std::span<const float> Engine::logits() const { return impl_->session->logits(); }
int64_t Engine::tokens() const { return impl_->session->tokens(); }
Status Engine::truncate(int64_t tokens) { return impl_->session->truncate(tokens); }
Status Engine::save(const std::string& path) { return save_session(*impl_->session, path).status(); }

Status Engine::restore(const std::string& path, bool verify) {
  KvRestoreOptions options;
  options.verify = verify;
  return restore_session(*impl_->session, path, options).status();
}

std::string Engine::recipe() const { return impl_->session->kv().recipe().canonical(); }

EngineStats Engine::stats() const {
  const KvStats& s = impl_->session->kv().stats();
  return {s.steps, s.kv_bytes, s.index_bytes};
}

}  // namespace longkv
