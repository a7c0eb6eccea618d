// `longkv inspect`: what a model file holds. Needs no known family.
#include <memory>

#include "commands.h"
#include "common.h"
#include "gguf/inspect.h"
#include "kv/mask/draw.h"
#include "output.h"

namespace longkv::cli {

namespace {

struct InspectOptions {
  GlobalOptions global;
  std::string model;
};

Status run_inspect(const InspectOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_ASSIGN(const GgufFile file, GgufFile::open(o.model));
  std::string text = describe_gguf(file, o.global.json);
  if (!o.global.json && holds_channel_mask(file)) {
    LONGKV_ASSIGN(const std::string mask, draw_channel_mask(file));
    text += mask;
  }
  return print(text);
}

}  // namespace

void add_inspect(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand("inspect", "Show metadata and tensors of a GGUF file, a model or a mask");
  add_global_options(*command, o->global);
  command->add_option("-m,--model", o->model, "GGUF model file")->required();
  command->callback([o, &exit_code] { exit_code = report(run_inspect(*o)); });
}

}  // namespace longkv::cli
