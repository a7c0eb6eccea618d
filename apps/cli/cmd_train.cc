// `longkv train leank` and `longkv train duo`: learn a channel mask or head gates for a model.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/log.h"
#include "card.h"
#include "commands.h"
#include "common.h"
#include "interrupt.h"
#include "kv/mask/gates.h"
#include "kv/mask/leank.h"
#include "model/identity.h"
#include "output.h"
#include "tokenizer/tokenizer.h"
#include "train/trainer.h"

namespace longkv::cli {

namespace {

struct TrainCommand {
  GlobalOptions global;
  ModelOptions model;
  TrainOptions train;
  std::string output, checkpoint, gates;
  double streaming = 0.5;
  std::string shortest = "2K", longest = "8K", sink, window;
  std::vector<std::string> data;
  std::string learned = "channels", loss = "hidden", allocation = "bytes", removed = "best";
  bool binary = false, without_mean = false, only_data = false;
};

// A line at most every second.
std::function<void(const TrainProgress&)> progress_lines(bool channels) {
  const auto begin = std::chrono::steady_clock::now();
  auto last = std::make_shared<std::chrono::steady_clock::time_point>(begin);
  auto first_step = std::make_shared<int64_t>(-1);
  auto stage_begin = std::make_shared<std::chrono::steady_clock::time_point>(begin);
  auto stage = std::make_shared<int>(0);
  return [=](const TrainProgress& p) {
    const auto now = std::chrono::steady_clock::now();
    if (*stage != p.stage) {
      *stage = p.stage;
      *first_step = p.step - 1;
      *stage_begin = now;
    }
    if (p.step < p.steps && now - *last < std::chrono::seconds(1)) return;
    *last = now;
    const double spent = std::chrono::duration<double>(now - *stage_begin).count();
    const double each = p.step - *first_step > 1 ? spent / double(p.step - *first_step - 1) : 0.0;
    log_info("stage {} step {}/{}: loss {:.5f}, {} {:.1f}%, {:.0f} s left in this stage ({})", p.stage, p.step, p.steps,
             p.loss, channels ? (p.stage == 1 ? "mean scale" : "channels kept") : "mean gate", 100 * p.share,
             each * double(p.steps - p.step), p.kind);
  };
}

// On the card that was chosen; one that was not asked for and has too little memory leaves the work to the CPU.
Result<std::unique_ptr<Trainer>> make_trainer(const Opened& opened, const Tokenizer& tokenizer, const TrainOptions& o) {
  auto trainer = Trainer::create(opened.model, tokenizer, o, *opened.pool, opened.card, opened.card_chunk);
  if (trainer.ok() || !opened.card || opened.card_asked) return trainer;
  const Code code = trainer.status().code();
  if (code != Code::kOutOfMemory && code != Code::kUnsupported) return trainer;
  auto on_cpu = Trainer::create(opened.model, tokenizer, o, *opened.pool);
  if (on_cpu.ok()) log_info("the CPU runs this: {}", trainer.status().message());
  return on_cpu;
}

Status train(const TrainCommand& command, bool gates) {
  TrainOptions o = command.train;
  o.learned = gates ? Learned::kGates : command.learned == "channels" ? Learned::kChannels : Learned::kDirections;
  o.loss = command.loss == "hidden" ? TrainLoss::kHidden : TrainLoss::kDivergence;
  o.compensate = !command.without_mean;
  o.lessons.generated = !command.only_data;
  if (command.removed != "best") {
    o.removed = command.removed == "mean"       ? RemovedAs::kMean
                : command.removed == "constant" ? RemovedAs::kConstant
                                                : RemovedAs::kDrop;
  }
  LONGKV_TRY(apply_global_options(command.global));
  LONGKV_ASSIGN(o.shortest, parse_size(command.shortest, "--shortest"));
  LONGKV_ASSIGN(o.longest, parse_size(command.longest, "--longest"));
  LONGKV_ASSIGN(o.sink, parse_size(command.sink, "--sink"));
  LONGKV_ASSIGN(o.window, parse_size(command.window, "--window"));
  o.allocation = command.allocation == "bytes"      ? Allocation::kBytes
                 : command.allocation == "channels" ? Allocation::kChannels
                                                    : Allocation::kThreshold;
  o.keep_scales = !command.binary;
  for (const std::string& path : command.data) {
    LONGKV_ASSIGN(std::string text, read_text_file(path));
    o.lessons.texts.push_back(std::move(text));
  }
  // That the result can be written is known before hours of work.
  LONGKV_ASSIGN(AtomicFile output, AtomicFile::create(command.output));
  ModelOptions model = command.model;
  model.context = fmt::format("{}", o.longest + o.lessons.max_chunk);
  model.can_use_card = model.card_reads = true;
  model.learn_chunk = o.lessons.max_chunk;
  LONGKV_ASSIGN(const Opened opened, open_model(model));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  if (!command.gates.empty()) {
    const ModelConfig& c = opened.model->config();
    LONGKV_ASSIGN(const DuoGates loaded, load_gates(command.gates, c.kv_shape(), model_identity(c)));
    o.streaming = streaming_heads(loaded.values, command.streaming);
  }
  LONGKV_ASSIGN(const std::unique_ptr<Trainer> trainer, make_trainer(opened, tokenizer, o));
  const std::string checkpoint = command.checkpoint.empty() ? command.output + ".checkpoint" : command.checkpoint;
  const bool channels = !gates;
  log_info(
      "train: on {}; documents of {} to {} tokens, {} questions each; first {} and last {} rows stay whole; stage 1 {} "
      "steps at rate {}, lambda {}{}",
      trainer->on_card() ? opened.card->device().name : "the CPU", o.shortest, o.longest, o.lessons.questions, o.sink,
      o.window, o.steps, o.rate, o.lambda,
      channels ? fmt::format("; stage 2 {} steps at rate {}, {} in place of {:.0f}% of channels, multiples of {}",
                             o.refine_steps, o.refine_rate, command.learned, 100 * o.ratio, o.align)
               : "");
  LONGKV_ASSIGN(const TrainResult result, trainer->run(checkpoint, progress_lines(channels), install_interrupt_flag()));
  const ModelConfig& c = opened.model->config();
  nlohmann::ordered_json row;
  row["model"] = c.name;
  row["device"] = trainer->on_card() ? opened.card->device().name : "CPU";
  row["held_out_loss_before_last_stage"] = result.held_out_start;
  row["held_out_loss"] = result.held_out;
  if (channels) {
    LONGKV_TRY(save_leank_sidecar(command.output, c.kv_shape(), result.mask));
    row["channels_kept"] = share_kept(trainer->shape(), result.counts);
    row["bytes_of_old_rows_kept"] = share_of_bytes(trainer->shape(), result.counts);
    row["heads_without_channels"] = std::count(result.counts.begin(), result.counts.end(), 0) -
                                    (trainer->shape().heads() - trainer->shape().learned_heads());
  } else {
    const DuoGates gates{c.layers, c.kv_heads, {result.gates.begin(), result.gates.end()},
                         o.sink,   o.window,   model_identity(c)};
    if (command.output.ends_with(".gguf")) {
      LONGKV_TRY(save_gates_sidecar(command.output, gates));
    } else {
      const std::string table = gates_table(gates);
      LONGKV_TRY(output.write({reinterpret_cast<const uint8_t*>(table.data()), table.size()}));
      LONGKV_TRY(output.commit());
    }
  }
  std::error_code ignored;
  std::filesystem::remove(checkpoint, ignored);
  row["output"] = command.output;
  if (command.global.json) return print(row.dump() + "\n");
  std::string text;
  for (const auto& [key, value] : row.items()) text += fmt::format("{}: {}\n", key, value.dump());
  return print(text);
}

void add_kind(CLI::App& parent, int& exit_code, bool gates, const char* name, const char* what, const char* output) {
  auto o = std::make_shared<TrainCommand>();
  CLI::App* command = parent.add_subcommand(name, what);
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/false);
  TrainOptions& t = o->train;
  const bool channels = !gates;
  o->sink = channels ? "128" : "64";
  o->window = channels ? "768" : "256";
  if (gates) {
    t.lambda = 0.05;
    t.steps = 300;
  }
  command->add_option("-o,--output", o->output, output)->required();
  command->add_option("--data", o->data, "Texts to learn from beside the generated ones");
  command->add_flag("--only-data", o->only_data, "Learn from them alone");
  command->add_option("--shortest", o->shortest, "Tokens of the shortest documents")->capture_default_str();
  command->add_option("--longest", o->longest, "Tokens of the longest")->capture_default_str();
  command
      ->add_option("--documents", t.documents,
                   "Documents of each kind held at once: what is kept is decided on all of them")
      ->capture_default_str();
  command->add_option("--questions", t.lessons.questions, "Questions, one step each, for a document")
      ->capture_default_str();
  command->add_option("--chunk", t.lessons.max_chunk, "Most tokens of a question with its answer, or of a continuation")
      ->capture_default_str();
  command->add_option("--loss", o->loss, "hidden: distance of final hidden states; divergence: of the next token")
      ->check(CLI::IsMember({"hidden", "divergence"}))
      ->capture_default_str();
  command->add_option("--sink", o->sink, "First rows that stay whole, as in the recipe")->capture_default_str();
  command->add_option("--window", o->window, "Last rows that stay whole, as in the recipe")->capture_default_str();
  command->add_option("--steps", t.steps, "Steps that learn from 1 (published: 2000)")->capture_default_str();
  command->add_option("--rate", t.rate, "Adam's rate in it")->capture_default_str();
  command->add_option("--lambda", t.lambda, "Pressure on the values, relative to the loss")->capture_default_str();
  if (channels) {
    command
        ->add_option("--learn", o->learned,
                     "channels: which ones stay; directions: what products of keys are held instead")
        ->check(CLI::IsMember({"channels", "directions"}))
        ->capture_default_str();
    command->add_option("--ratio", t.ratio, "Share of K channels to drop")->capture_default_str();
    command->add_option("--bytes", t.bytes, "Share of K and V bytes of old rows to keep (0: what --ratio leaves)")
        ->capture_default_str();
    command->add_option("--align", t.align, "Channels are kept in multiples of this")->capture_default_str();
    command->add_option("--refine-steps", t.refine_steps, "Steps under the mask (published: 200)")
        ->capture_default_str();
    command->add_option("--refine-rate", t.refine_rate, "Adam's rate in them")->capture_default_str();
    command
        ->add_option(
            "--allocation", o->allocation,
            "bytes: least loss for the bytes of K and V; channels: for the number of channels; threshold: LeanK's")
        ->check(CLI::IsMember({"bytes", "channels", "threshold"}))
        ->capture_default_str();
    command->add_flag("--without-mean", o->without_mean, "Do not add back the mean of what old keys lost");
    command
        ->add_option("--removed", o->removed,
                     "What stands for heads that keep nothing: mean, constant, drop, or for each the best")
        ->check(CLI::IsMember({"best", "mean", "constant", "drop"}))
        ->capture_default_str();
    command->add_option("--gates", o->gates, "DuoAttention's gates: their streaming heads keep no old rows");
    command->add_option("--streaming", o->streaming, "Share of heads that stream")->capture_default_str();
    command->add_flag("--binary", o->binary, "Write 1 for kept channels instead of their learned scale");
  }
  command->add_option("--held-out", t.held_out, "Questions that decide what is written")->capture_default_str();
  command->add_option("--seed", t.lessons.seed, "Of the generated texts")->capture_default_str();
  command->add_option("--checkpoint", o->checkpoint, "Where a stopped run goes on from (default: OUTPUT.checkpoint)");
  command->callback([o, gates, &exit_code] { exit_code = report(train(*o, gates)); });
}

}  // namespace

void add_train(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("train", "Learn what the recipes leank and duo need for a model");
  command->require_subcommand(1);
  add_kind(*command, exit_code, false, "leank", "Learn which K channels old rows can do without",
           "Mask to write; use it as --kv leank:mask=FILE");
  add_kind(
      *command, exit_code, true, "duo", "Learn which heads need old rows",
      "Gates to write (.gguf: with the model's identity; else the authors' table); use them as --kv duo:gates=FILE");
}

}  // namespace longkv::cli
