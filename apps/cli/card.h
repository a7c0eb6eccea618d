// Which card runs a model, by llama.cpp's options.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "common.h"
#include "longkv/status.h"

namespace longkv::cli {

void add_card_options(CLI::App& command, ModelOptions& options);
// For a command that runs on the CPU only: help does not offer the options; -ngl 0 is still accepted, a card refused.
void hide_card_options(CLI::App& command);

// Whether the command line asks for a card, so that going without is an error.
bool card_wanted(const ModelOptions& options);

// Sets opened.card, card_asked and card_chunk; opened has model and recipe. Without an explicit wish and a card that
// can do this work, the CPU does it. Errors: kInvalidArgument (options), and for an explicit wish what CardModel::load
// and card_supports say.
Status choose_card(const ModelOptions& options, Opened& opened);

// Cards and their free memory: lines for people, and for programs.
std::string cards_text();
nlohmann::ordered_json cards_json();

}  // namespace longkv::cli
