#include "engine/batch.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace longkv {

BatchDecoder::BatchDecoder(std::shared_ptr<const LoadedModel> model, int64_t context, ProductType products,
                           ThreadPool& pool)
    : graph_(std::move(model), context, products, pool) {}

void BatchDecoder::decode(std::span<Session* const> sessions, std::span<const int32_t> ids, std::span<Status> results) {
  std::vector<Session*> group;
  std::vector<int32_t> group_ids;
  std::vector<size_t> places;
  const auto flush = [&] {
    std::vector<Status> group_results(group.size());
    decode_group(group, group_ids, group_results);
    for (size_t i = 0; i < places.size(); ++i) results[places[i]] = std::move(group_results[i]);
    group.clear(), group_ids.clear(), places.clear();
  };
  size_t alone = 0;
  for (size_t i = 0; i < sessions.size(); ++i) {
    // A checked step computes its token twice, so it goes its own way; so does what decode() refuses.
    Session& s = *sessions[i];
    const bool checks = s.check_every_ > 0 && s.decoded_ % s.check_every_ == 0;
    if (checks || s.tokens() >= s.context() || ids[i] < 0 || ids[i] >= s.model().config().vocab) {
      results[i] = s.decode(ids[i]);
      ++alone;
      continue;
    }
    group.push_back(&s);
    group_ids.push_back(ids[i]);
    places.push_back(i);
    if (group.size() == kRows) flush();
  }
  if (group.size() == 1 && alone == 0 && sessions.size() == 1) {
    results[0] = group[0]->decode(group_ids[0]);  // without copies
  } else if (!group.empty()) {
    flush();
  }
}

void BatchDecoder::decode_group(std::span<Session* const> sessions, std::span<const int32_t> ids,
                                std::span<Status> results) {
  const ModelConfig& c = graph_.model().config();
  const size_t n = sessions.size();
  logits_.resize(std::max(logits_.size(), n * size_t(c.vocab)));
  kvs_.clear(), positions_.clear();
  for (size_t i = 0; i < n; ++i) {
    Session& s = *sessions[i];
    s.last_checked_ = false;
    ++s.decoded_;
    kvs_.push_back(&s.kv());
    positions_.push_back(s.tokens());
    results[i] = s.note_classes(ids.subspan(i, 1));
  }
  decode_rows(ids, logits_.data(), results);
  for (size_t i = 0; i < n; ++i) {
    if (!results[i].ok()) continue;
    sessions[i]->note_decoded(positions_[i], ids[i]);
    std::copy_n(logits_.data() + i * size_t(c.vocab), size_t(c.vocab), sessions[i]->logits_.begin());
    results[i] = sessions[i]->check_logits();
  }
}

void BatchDecoder::decode_rows(std::span<const int32_t> ids, float* logits, std::span<Status> results) {
  const ModelConfig& c = graph_.model().config();
  hidden_.resize(std::max(hidden_.size(), ids.size() * size_t(c.dim)));
  if (const Status s = graph_.embed(ids.data(), int64_t(ids.size()), hidden_.data()); !s.ok()) {
    std::fill(results.begin(), results.end(), s);
    return;
  }
  for (int layer = 0; layer < c.layers; ++layer) graph_.decode_rows(layer, kvs_, hidden_.data(), positions_, results);
  graph_.logits(hidden_.data(), int64_t(ids.size()), logits, /*apart=*/true);
}

void BatchDecoder::decode(std::span<KvSession* const> kvs, std::span<const int32_t> ids, float* logits,
                          std::span<Status> results) {
  const auto vocab = size_t(graph_.model().config().vocab);
  for (size_t begin = 0; begin < kvs.size(); begin += kRows) {
    const size_t n = std::min(kRows, kvs.size() - begin);
    kvs_.assign(kvs.begin() + int64_t(begin), kvs.begin() + int64_t(begin + n));
    positions_.clear();
    for (const KvSession* kv : kvs_) positions_.push_back(kv->tokens().v);
    float* rows = logits + begin * vocab;
    decode_rows(ids.subspan(begin, n), rows, results.subspan(begin, n));
    for (size_t i = 0; i < n; ++i) {
      if (results[begin + i].ok())
        results[begin + i] = Session::check_logits({rows + i * vocab, vocab}, positions_[i] + 1);
    }
  }
}

}  // namespace longkv
