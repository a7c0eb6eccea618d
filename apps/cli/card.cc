#include "card.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "base/error.h"
#include "base/log.h"
#include "cuda/card_session.h"
#include "cuda/cards.h"
#include "help.h"
#include "kv/plan.h"

namespace longkv::cli {

void add_card_options(CLI::App& command, ModelOptions& o) {
  command
      .add_option("--gpu-layers,--n-gpu-layers,--ngl", o.gpu_layers,
                  "Layers on the graphics card: 0, all (or their number), auto")
      ->default_str("auto");
  command.add_option("--device,--dev", o.device, "Card to use: none, cuda0, cuda1, ...")->group(kMore);
  command
      .add_option("--kv-place", o.kv_place,
                  "Where the KV cache lies: gpu; cpu: in memory, also with -ngl; hybrid: rows in memory, blocks in use "
                  "on the card")
      ->check(CLI::IsMember({"gpu", "cpu", "hybrid"}))
      ->group(kMore);
  command.add_option("--vram", o.vram, "Most memory of the card to use (K, M, G); default: what is free")->group(kMore);
}

void hide_card_options(CLI::App& command) {
  for (const char* name : {"--gpu-layers", "--device", "--kv-place", "--vram"}) command.get_option(name)->group("");
}

bool card_wanted(const ModelOptions& o) {
  const bool layers = !o.gpu_layers.empty() && o.gpu_layers != "auto" && o.gpu_layers != "0";
  const bool device = !o.device.empty() && o.device != "none";
  return layers || device || o.kv_place == "gpu" || o.kv_place == "hybrid";
}

namespace {

// Card index of "cuda1"; -1 for "none".
Result<int> device_index(const std::string& text) {
  if (text.empty()) return 0;
  std::string name = text;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  if (name == "none" || name == "cpu") return -1;
  int index = 0;
  const size_t digits = name.starts_with("cuda") ? 4 : 0;
  const auto [end, error] = std::from_chars(name.data() + digits, name.data() + name.size(), index);
  if (error != std::errc() || end != name.data() + name.size() || index < 0)
    return fail(Code::kInvalidArgument, "--device '{}' is not known; known are none, cuda0, cuda1, ...", text);
  return index;
}

// Whether all layers go to the card; the others stay on the CPU.
Result<bool> all_layers(const std::string& text, int layers) {
  if (text.empty() || text == "auto" || text == "all") return true;
  int64_t n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size())
    return fail(Code::kInvalidArgument, "-ngl '{}' must be a number, auto or all", text);
  if (n < 0 || n >= layers) return true;  // llama.cpp's users write 99 or -1 for all
  if (n == 0) return false;
  return fail(Code::kUnsupported, "-ngl {} of {} layers: longkv runs all layers on the card or none; use all or 0", n,
              layers);
}

}  // namespace

Status choose_card(const ModelOptions& o, Opened& opened) {
  LONGKV_ASSIGN(const int index, device_index(o.device));
  LONGKV_ASSIGN(const bool all, all_layers(o.gpu_layers, opened.model->config().layers));
  CardOptions card{index, 0};
  if (!o.vram.empty()) {
    LONGKV_ASSIGN(card.vram_cap, parse_size(o.vram, "--vram"));
    if (card.vram_cap == 0) return fail(Code::kInvalidArgument, "--vram {} must be above 0", o.vram);
  }
  opened.card_asked = card_wanted(o);
  opened.card_chunk = o.chunk.value_or(0);
  if (index < 0 || !all || (o.kv_place == "cpu" && !opened.card_asked)) {
    if (!opened.card_asked) return {};
    return fail(Code::kInvalidArgument, "-ngl {}, --device {} and --kv-place {} contradict each other",
                o.gpu_layers.empty() ? "auto" : o.gpu_layers, o.device.empty() ? "(first)" : o.device,
                o.kv_place.empty() ? "(auto)" : o.kv_place);
  }
  if (o.card_reads && (o.kv_place == "gpu" || o.kv_place == "hybrid")) {
    return fail(Code::kInvalidArgument,
                "--kv-place {}: this command decodes under every recipe on the CPU, from rows in memory; a card reads "
                "its prompts (-ngl all)",
                o.kv_place);
  }
  opened.card_kv = o.kv_place != "cpu" && !o.card_reads;
  opened.card_decodes = !o.card_reads;
  opened.card_hybrid = o.kv_place == "hybrid";
  Status refused;
  if (!o.can_use_card) {
    refused = fail(Code::kUnsupported, "this command runs on the CPU only; leave -ngl, --device and --kv-place out");
  } else if (const auto cards = cuda_cards(); !cards.ok()) {
    refused = cards.status();
    // Most machines have none: worth a line only to those who ask.
    if (!opened.card_asked) {
      log_verbose("the CPU runs this: {}", refused.message());
      return {};
    }
  } else {
    refused = opened.card_hybrid ? card_supports_hybrid(*opened.model, opened.recipe)
              : opened.card_kv   ? card_supports(*opened.model, opened.recipe)
                                 : card_supports_host_kv(*opened.model, opened.recipe);
    if (refused.ok()) {
      auto loaded = CardModel::load(opened.model, card);
      refused = loaded.status();
      if (loaded.ok()) opened.card = std::move(loaded).value();
    }
  }
  if (opened.card) {
    const CudaCard& c = opened.card->device();
    log_verbose("{}, {} of {} MiB free: weights take {} MiB", c.name, c.free_bytes >> 20, c.total_bytes >> 20,
                opened.card->vram_used() >> 20);
    return {};
  }
  if (opened.card_asked) return refused;
  if (o.can_use_card) log_info("the CPU runs this: {}", refused.message());
  return {};
}

std::string cards_text() {
  const auto cards = cuda_cards();
  if (!cards.ok()) return fmt::format("cards: none; {} ({})\n", cards.status().message(), cuda_build());
  std::string text = fmt::format("cards ({}):\n", cuda_build());
  for (const CudaCard& c : *cards) {
    text += fmt::format("  cuda{}: {}, compute capability {}.{}, {} free of {}\n", c.index, c.name, c.major, c.minor,
                        format_bytes(c.free_bytes), format_bytes(c.total_bytes));
  }
  return text;
}

nlohmann::ordered_json cards_json() {
  auto list = nlohmann::ordered_json::array();
  const auto cards = cuda_cards();
  if (!cards.ok()) return list;
  for (const CudaCard& c : *cards) {
    list.push_back({{"device", fmt::format("cuda{}", c.index)},
                    {"name", c.name},
                    {"compute_capability", fmt::format("{}.{}", c.major, c.minor)},
                    {"multiprocessors", c.multiprocessors},
                    {"total_bytes", c.total_bytes},
                    {"free_bytes", c.free_bytes}});
  }
  return list;
}

}  // namespace longkv::cli
