#include "card.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

#include "base/error.h"
#include "base/log.h"
#include "cuda/card_chunk_ops.h"
#include "cuda/card_session.h"
#include "cuda/cards.h"
#include "help.h"
#include "kv/plan.h"

namespace longkv::cli {

void add_card_options(CLI::App& command, ModelOptions& o) {
  command
      .add_option("--gpu-layers,--n-gpu-layers,--ngl", o.gpu_layers,
                  "Layers on the graphics card, the last ones: a number, all, or auto, which is as many as fit")
      ->default_str("auto");
  command.add_option("--device,--dev", o.device, "Card to use: none, cuda0, cuda1, ...")->group(kMore);
  command
      .add_option("--kv-place", o.kv_place,
                  "Where the KV cache lies: gpu; cpu: in memory, also with -ngl; hybrid: rows in memory, blocks in use "
                  "on the card; disk: in a file, of which memory holds what was used lately")
      ->check(CLI::IsMember({"gpu", "cpu", "hybrid", "disk"}))
      ->group(kMore);
  command.add_option("--kv-dir", o.kv_dir, "Folder of --kv-place disk; default: TMPDIR, else /var/tmp")->group(kMore);
  command.add_option("--vram", o.vram, "Most memory of the card to use (K, M, G); default: what is free")->group(kMore);
}

void hide_card_options(CLI::App& command) {
  for (const char* name : {"--gpu-layers", "--device", "--kv-place", "--kv-dir", "--vram"})
    command.get_option(name)->group("");
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

// Layers that go to the card; -1: as many as fit.
Result<int> asked_layers(const std::string& text, int layers) {
  if (text.empty() || text == "auto") return -1;
  if (text == "all") return layers;
  int64_t n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size())
    return fail(Code::kInvalidArgument, "-ngl '{}' must be a number, auto or all", text);
  return n < 0 || n >= layers ? layers : int(n);  // llama.cpp's users write 99 or -1 for all
}

Result<int64_t> asked_vram(const ModelOptions& o) {
  if (o.vram.empty()) return 0;
  LONGKV_ASSIGN(const int64_t bytes, parse_size(o.vram, "--vram"));
  if (bytes == 0) return fail(Code::kInvalidArgument, "--vram {} must be above 0", o.vram);
  return bytes;
}

CardRows rows_of(bool kv, bool hybrid) {
  return hybrid ? CardRows::kHybrid : kv ? CardRows::kOnCard : CardRows::kInMemory;
}

// What of the recipe a card cannot do, its rows being where they are to lie.
Status supported(const LoadedModel& model, const Recipe& recipe, bool kv, bool hybrid) {
  return hybrid ? card_supports_hybrid(model, recipe)
         : kv   ? card_supports(model, recipe)
                : card_supports_host_kv(model, recipe);
}

CardPlanRequest request_for(const Opened& opened, int64_t context, int64_t cap, const CudaCard* card) {
  // Memory that the card itself needs beside what a program asks for: rounding of its allocations.
  constexpr int64_t kSpare = int64_t(256) << 20;
  CardPlanRequest q;
  q.recipe = opened.recipe;
  q.context = context;
  q.chunk = opened.card_chunk;
  // Recipes that evict hold their rows in memory, and few on the card.
  q.rows = rows_of(opened.card_kv && !opened.recipe.keep.evicts(), opened.card_hybrid);
  q.budget = cap;
  if (card != nullptr) {
    const int64_t free = std::max<int64_t>(0, card->free_bytes - kSpare);
    q.budget = cap > 0 ? std::min(cap, free) : free;
    q.multiprocessors = card->multiprocessors;
  }
  return q;
}

// What of a divided model lies in memory must fit there.
Status check_memory(const CardPlan& card, const KvPlan& all, bool rows_too) {
  const double share = double(card.in_memory()) / double(card.layers);
  const int64_t rows = rows_too ? int64_t(share * double(all.k_bytes + all.v_bytes + all.index_bytes)) : 0;
  const int64_t needed = card.memory_bytes + rows, available = all.machine.ram_bytes;
  if (available <= 0 || needed <= available) return {};
  return fail(Code::kOutOfMemory,
              "{} of {} layers stay in memory and need {} there ({} of weights, {} of KV), {} are available",
              card.in_memory(), card.layers, format_bytes(needed), format_bytes(card.memory_bytes), format_bytes(rows),
              format_bytes(available));
}

// Loads what of the model goes to the card, as asked or as fits.
Status load_card(const ModelOptions& o, int asked, int64_t cap, const CudaCard& card, const KvPlan& all,
                 Opened& opened) {
  CardPlanRequest q = request_for(opened, o.card_context > 0 ? o.card_context : opened.context, cap, &card);
  q.layers = asked;
  if (o.learn_chunk > 0) {
    q.budget = std::max<int64_t>(0, q.budget - card_learn_bytes(opened.model->config(), q.context, o.learn_chunk));
  }
  LONGKV_ASSIGN(const CardPlan plan, plan_card(*opened.model, q));
  if (asked < 0 && !plan.fits()) {
    return fail(Code::kOutOfMemory, "{} of VRAM are too few for {} tokens with even one layer at a time: {} are needed",
                format_bytes(plan.budget), q.context, format_bytes(plan.total()));
  }
  if (plan.in_memory() > 0 && opened.card_kv && opened.recipe.keep.evicts()) {
    return fail(Code::kUnsupported,
                "the recipe {} drops or merges rows; a card decodes it with all layers there, {} fit",
                opened.recipe.canonical(), plan.on_card);
  }
  if (plan.in_memory() > 0) LONGKV_TRY(check_memory(plan, all, opened.card_kv));
  auto loaded = CardModel::load(opened.model, {card.index, cap, plan.in_memory()});
  if (!loaded.ok()) return with_card_hint(opened, q.context, loaded.status(), cap, card);
  opened.card = std::move(loaded).value();
  log_verbose("{}, {} of {} MiB free: weights take {} MiB", card.name, card.free_bytes >> 20, card.total_bytes >> 20,
              opened.card->vram_used() >> 20);
  if (plan.in_memory() > 0) {
    log_info(
        "{} of {} layers on the card; the CPU decodes the first {}, whose {} of weights cross the bus once for {} or "
        "more tokens of a prompt",
        plan.on_card, plan.layers, plan.in_memory(), format_bytes(plan.memory_bytes), plan.span);
  }
  return {};
}

}  // namespace

Status with_card_hint(const Opened& opened, int64_t context, const Status& failed, int64_t cap, const CudaCard& card) {
  if (failed.code() != Code::kOutOfMemory) return failed;
  const auto plan = plan_card(*opened.model, request_for(opened, context, cap, &card));
  if (!plan.ok() || !plan->fits()) return failed;
  return fail(failed.code(), "{}; by plan {} of {} layers fit with {} tokens: -ngl {}", failed.message(), plan->on_card,
              plan->layers, context, plan->on_card);
}

Status choose_card(const ModelOptions& o, const KvPlan& all, Opened& opened) {
  LONGKV_ASSIGN(const int index, device_index(o.device));
  LONGKV_ASSIGN(const int asked, asked_layers(o.gpu_layers, opened.model->config().layers));
  LONGKV_ASSIGN(const int64_t cap, asked_vram(o));
  opened.card_asked = card_wanted(o);
  opened.card_chunk = o.chunk.value_or(0);
  const bool off_card = o.kv_place == "cpu" || o.kv_place == "disk";
  if (index < 0 || asked == 0 || (off_card && !opened.card_asked)) {
    if (!opened.card_asked) return {};
    return fail(Code::kInvalidArgument, "-ngl {}, --device {} and --kv-place {} contradict each other",
                o.gpu_layers.empty() ? "auto" : o.gpu_layers, o.device.empty() ? "(first)" : o.device,
                o.kv_place.empty() ? "(auto)" : o.kv_place);
  }
  if (o.card_reads && (o.kv_place == "gpu" || o.kv_place == "hybrid")) {
    return fail(Code::kInvalidArgument,
                "--kv-place {}: this command {}, from rows in memory; a card reads its prompts (-ngl all)", o.kv_place,
                o.learn_chunk > 0 ? "learns" : "decodes under every recipe on the CPU");
  }
  opened.card_kv = !off_card && !o.card_reads;
  opened.card_decodes = !o.card_reads;
  opened.card_hybrid = o.kv_place == "hybrid";
  Status refused;
  if (!o.can_use_card) {
    refused = fail(Code::kUnsupported, "this command runs on the CPU only; leave -ngl, --device and --kv-place out");
  } else if (const auto card = open_card(index); !card.ok()) {
    refused = card.status();
    // Most machines have none: worth a line only to those who ask.
    if (!opened.card_asked) {
      log_verbose("the CPU runs this: {}", refused.message());
      return {};
    }
  } else {
    refused = supported(*opened.model, opened.recipe, opened.card_kv, opened.card_hybrid);
    if (refused.ok()) refused = load_card(o, asked, cap, *card, all, opened);
  }
  if (opened.card) return {};
  if (opened.card_asked) return refused;
  if (o.can_use_card) log_info("the CPU runs this: {}", refused.message());
  return {};
}

Result<std::optional<CardPlan>> plan_of_card(const ModelOptions& o, const Opened& opened, const KvPlan& all) {
  LONGKV_ASSIGN(const int index, device_index(o.device));
  LONGKV_ASSIGN(const int64_t cap, asked_vram(o));
  LONGKV_ASSIGN(const int asked, asked_layers(o.gpu_layers, opened.model->config().layers));
  if (index < 0 || asked == 0) return std::optional<CardPlan>();
  const auto found = open_card(index);
  const CudaCard* card = found.ok() ? &*found : nullptr;
  if (card == nullptr && cap == 0) {
    if (!card_wanted(o)) return std::optional<CardPlan>();
    return fail(Code::kInvalidArgument, "this machine has no card to plan with; --vram says how much memory one has");
  }
  Opened placed;
  placed.recipe = opened.recipe;
  placed.card_chunk = o.chunk.value_or(0);
  placed.card_kv = o.kv_place != "cpu" && o.kv_place != "disk";
  placed.card_hybrid = o.kv_place == "hybrid";
  if (card != nullptr) {
    const Status can = supported(*opened.model, opened.recipe, placed.card_kv, placed.card_hybrid);
    if (!can.ok() && card_wanted(o)) return can;
    if (!can.ok()) return std::optional<CardPlan>();
  }
  // Without a card --vram describes the one that is planned for.
  CardPlanRequest q = request_for(placed, all.context, cap, card);
  q.layers = asked;
  LONGKV_ASSIGN(const CardPlan plan, plan_card(*opened.model, q));
  if (plan.fits() && plan.in_memory() > 0) LONGKV_TRY(check_memory(plan, all, placed.card_kv));
  return std::optional<CardPlan>(plan);
}

std::string cards_text() {
  const auto cards = cuda_cards();
  if (!cards.ok()) return fmt::format("cards: none; {} ({})\n", cards.status().message(), cuda_build());
  std::string text = fmt::format("cards ({}):\n", cuda_build());
  for (const CudaCard& c : *cards) {
    const auto card = open_card(c.index);
    text += fmt::format("  cuda{}: {}, compute capability {}.{}, {} free of {}\n", c.index, c.name, c.major, c.minor,
                        card.ok() ? format_bytes(card->free_bytes) : "? (" + card.status().message() + ")",
                        format_bytes(c.total_bytes));
  }
  return text;
}

nlohmann::ordered_json cards_json() {
  auto list = nlohmann::ordered_json::array();
  const auto cards = cuda_cards();
  if (!cards.ok()) return list;
  for (const CudaCard& c : *cards) {
    nlohmann::ordered_json j = {{"device", fmt::format("cuda{}", c.index)},
                                {"name", c.name},
                                {"compute_capability", fmt::format("{}.{}", c.major, c.minor)},
                                {"multiprocessors", c.multiprocessors},
                                {"total_bytes", c.total_bytes}};
    if (const auto card = open_card(c.index); card.ok()) {
      j["free_bytes"] = card->free_bytes;
    } else {
      j["error"] = card.status().message();
    }
    list.push_back(std::move(j));
  }
  return list;
}

}  // namespace longkv::cli
