// The next token of an answer: sampled, held to a grammar where there is one, with its log probability.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sample/sampler.h"
#include "server/events.h"
#include "server/json_grammar.h"
#include "tokenizer/tokenizer.h"

namespace longkv::server {

// A token that the grammar takes, as the sampler would choose among those; nullopt where the vocabulary has none.
std::optional<int32_t> choose_token(Sampler& sampler, std::span<const float> logits, const JsonAcceptor* grammar,
                                    const Tokenizer& tokenizer);

// Log probability of `id` and of the `top` likeliest tokens.
TokenReport report_token(std::span<const float> logits, int32_t id, int top, const Tokenizer& tokenizer);

}  // namespace longkv::server
