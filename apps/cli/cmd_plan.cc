// `longkv plan`: what fits in memory and what a token costs, before anything is allocated.
#include <memory>

#include "base/error.h"
#include "card.h"
#include "commands.h"
#include "common.h"
#include "output.h"
#include "planning.h"

namespace longkv::cli {

namespace {

struct PlanOptions {
  GlobalOptions global;
  ModelOptions model;
  std::string ram;
};

Status run_plan(const PlanOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_ASSIGN(const Opened opened, open_model(o.model, /*must_fit=*/false));
  LONGKV_TRY(check_recipe_files(opened));
  PlanLimits limits;
  if (!o.ram.empty()) {
    LONGKV_ASSIGN(limits.ram_bytes, parse_size(o.ram, "--ram"));
    if (limits.ram_bytes == 0) return fail(Code::kInvalidArgument, "--ram {} must be above 0", o.ram);
  }
  limits.bandwidth = int64_t(read_bandwidth(*opened.pool));
  limits.disk_bytes = opened.disk_bytes;
  LONGKV_ASSIGN(const KvPlan plan, plan_for(*opened.model, opened.recipe, opened.asked_context, opened.chunk,
                                            opened.pool->threads(), limits));
  nlohmann::ordered_json cards = cards_json();
  LONGKV_ASSIGN(const std::optional<CardPlan> card, plan_of_card(o.model, opened, plan));
  if (o.global.json) {
    auto j = plan_json(plan);
    if (!cards.empty()) j["cards"] = cards;
    if (card) j["card"] = card_plan_json(*card);
    LONGKV_TRY(print(json_text(j)));
  } else {
    LONGKV_TRY(print(plan_text(plan) + (cards.empty() ? "" : cards_text()) + (card ? card_plan_text(*card) : "")));
  }
  if (card && !card->fits() && card_wanted(o.model)) {
    return fail(Code::kOutOfMemory, "{} of VRAM are needed, {} more than there are", format_bytes(card->total()),
                format_bytes(card->total() - card->budget));
  }
  return card && card->fits() && o.model.kv_place != "cpu" && o.model.kv_place != "disk" ? Status() : check_plan(plan);
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<PlanOptions>();
  CLI::App* command =
      app.add_subcommand("plan", "Show what fits and what a token reads; exit code 1 if it does not fit");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/true);
  o->model.plans_card = true;
  command->add_option("--ram", o->ram, "Memory to plan with (K, M, G); default: what is available");
  command->callback([o, &exit_code] { exit_code = report(run_plan(*o)); });
}

}  // namespace longkv::cli
