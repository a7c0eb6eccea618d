#include "server/choose_token.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace longkv::server {

namespace {

bool takes(const JsonAcceptor& grammar, const Tokenizer& tokenizer, int32_t id) {
  if (tokenizer.is_eog(id)) return grammar.complete();
  if (tokenizer.is_control(id)) return false;
  const std::string_view piece = tokenizer.piece(id);
  return !piece.empty() && JsonAcceptor(grammar).push(piece);
}

}  // namespace

std::optional<int32_t> choose_token(Sampler& sampler, std::span<const float> logits, const JsonAcceptor* grammar,
                                    const Tokenizer& tokenizer) {
  const int32_t free_choice = sampler.sample(logits);
  if (grammar == nullptr || takes(*grammar, tokenizer, free_choice)) return free_choice;

  // Most tokens fail at their first byte already.
  std::array<bool, 256> first;
  for (size_t c = 0; c < first.size(); ++c) {
    const char byte = char(c);
    first[c] = JsonAcceptor(*grammar).push({&byte, 1});
  }
  std::vector<float> masked(logits.size(), -std::numeric_limits<float>::infinity());
  std::optional<int32_t> best;
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto id = int32_t(i);
    const std::string_view piece = tokenizer.piece(id);
    const bool may = tokenizer.is_eog(id) || (!piece.empty() && first[static_cast<unsigned char>(piece.front())]);
    if (!may || !takes(*grammar, tokenizer, id)) continue;
    masked[i] = logits[i];
    if (!best || logits[i] > logits[size_t(*best)]) best = id;
  }
  if (!best) return best;
  const int32_t chosen = sampler.sample(masked);
  // A bias may lift a token that is not allowed, and rounding may draw the last candidate whatever its chance.
  return std::isinf(masked[size_t(chosen)]) ? best : chosen;
}

TokenReport report_token(std::span<const float> logits, int32_t id, int top, const Tokenizer& tokenizer) {
  const float greatest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float v : logits) sum += std::exp(double(v) - greatest);
  const double log_sum = std::log(sum) + greatest;
  const auto chance = [&](int32_t token) {
    return TokenChance{token, std::string(tokenizer.piece(token)), double(logits[size_t(token)]) - log_sum};
  };
  TokenReport report{chance(id), {}};
  std::vector<int32_t> best(logits.size());
  for (size_t i = 0; i < best.size(); ++i) best[i] = int32_t(i);
  const size_t n = std::min(best.size(), size_t(std::max(top, 0)));
  std::partial_sort(best.begin(), best.begin() + long(n), best.end(), [&](int32_t a, int32_t b) {
    return logits[size_t(a)] > logits[size_t(b)] || (logits[size_t(a)] == logits[size_t(b)] && a < b);
  });
  for (size_t i = 0; i < n; ++i) report.top.push_back(chance(best[i]));
  return report;
}

}  // namespace longkv::server
