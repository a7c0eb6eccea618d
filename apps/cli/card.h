// Which card runs a model, by llama.cpp's options.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "common.h"
#include "cuda/card_plan.h"
#include "cuda/cards.h"
#include "kv/plan.h"
#include "longkv/status.h"

namespace longkv::cli {

void add_card_options(CLI::App& command, ModelOptions& options);
// For a command that runs on the CPU only: help does not offer the options; -ngl 0 is still accepted, a card refused.
void hide_card_options(CLI::App& command);

// Whether the command line asks for a card, so that going without is an error.
bool card_wanted(const ModelOptions& options);

// Sets opened.card, card_asked and card_chunk; opened has model, recipe and context, `all` is the plan of the whole in
// memory. Without an explicit wish and a card that can do it, the CPU runs the model with a line that says why. With a
// wish, errors of CardModel::load and card_supports say. As many layers go to the card as asked, or as fit.
Status choose_card(const ModelOptions& options, const KvPlan& all, Opened& opened);
// An error for want of VRAM, with the number of layers that would fit.
Status with_card_hint(const Opened& opened, int64_t context, const Status& failed, int64_t cap, const CudaCard& card);
// How options would divide the model with the context of `all`; nothing without a card and without --vram. Errors: also
// kOutOfMemory when what stays in memory does not fit there.
Result<std::optional<CardPlan>> plan_of_card(const ModelOptions& options, const Opened& opened, const KvPlan& all);

// Text and JSON for `version` and `plan`.
std::string cards_text();
nlohmann::ordered_json cards_json();

}  // namespace longkv::cli
