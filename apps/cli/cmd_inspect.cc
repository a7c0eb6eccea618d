// `longkv inspect`: what a model file holds. Needs no known family.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <span>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/inputs.h"
#include "commands.h"
#include "common.h"
#include "eval/svg.h"
#include "gguf/inspect.h"
#include "kv/mask/draw.h"
#include "kv/mask/gates.h"
#include "kv/mask/leank.h"
#include "kv/mask/torch_zip.h"
#include "output.h"

namespace longkv::cli {

namespace {

struct InspectOptions {
  GlobalOptions global;
  std::string model, picture, exported;
};

// Layers from above, KV heads from the left.
std::string picture_of(const KeptShares& shares, const std::string& path) {
  HeatMap map;
  map.title = fmt::format("{}: {}", shares.title, path);
  map.x_title = "KV head";
  map.y_title = "layer";
  for (int h = 0; h < shares.kv_heads; ++h) map.columns.push_back(fmt::format("{}", h));
  for (int layer = 0; layer < shares.layers; ++layer) {
    map.rows.push_back(fmt::format("{}", layer));
    std::vector<std::optional<double>> cells;
    std::vector<std::string> notes;
    for (int h = 0; h < shares.kv_heads; ++h) {
      const double kept = shares.kept[size_t(layer) * size_t(shares.kv_heads) + size_t(h)];
      cells.emplace_back(kept / double(shares.whole));
      notes.push_back(shares.whole > 1 ? fmt::format("{:.0f}", kept) : fmt::format("{:.2f}", kept));
    }
    map.cells.push_back(std::move(cells));
    map.notes.push_back(std::move(notes));
  }
  return heat_map(map);
}

Status write_file(const std::string& path, std::span<const uint8_t> bytes) {
  LONGKV_ASSIGN(AtomicFile file, AtomicFile::create(path));
  LONGKV_TRY(file.write(bytes));
  return file.commit();
}

Status write_file(const std::string& path, const std::string& text) {
  return write_file(path, {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

// In the forms that the methods' authors publish: gates as a table, a channel mask as torch.save writes a tensor.
Status export_learned(const GgufFile& file, const std::string& path) {
  if (is_gates_sidecar(file)) {
    LONGKV_ASSIGN(const DuoGates gates, read_gates_sidecar(file));
    return write_file(path, gates_table(gates));
  }
  LONGKV_ASSIGN(const LeankSidecar s, read_leank_sidecar(file));
  LONGKV_ASSIGN(const std::vector<float> factors, channel_factors(s.mask, s.dim_k));
  if (path.ends_with(".pth") || path.ends_with(".pt")) {
    return write_file(path, write_torch_floats(factors, {s.layers, s.kv_heads, s.dim_k}));
  }
  std::string text;
  const size_t line = size_t(s.kv_heads) * size_t(s.dim_k);
  for (size_t i = 0; i < factors.size(); ++i)
    text += fmt::format("{}{}", factors[i], i % line == line - 1 ? "\n" : "\t");
  return write_file(path, text);
}

Status run_inspect(const InspectOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_TRY(check_outputs_differ({{"--picture", o.picture}, {"--export", o.exported}}));
  note_input(o.model);
  LONGKV_ASSIGN(const GgufFile file, GgufFile::open(o.model));
  std::string text = describe_gguf(file, o.global.json);
  if (holds_learned(file)) {
    LONGKV_ASSIGN(const KeptShares shares, read_kept_shares(file));
    if (!o.global.json) text += draw_shares(shares);
    if (!o.picture.empty()) LONGKV_TRY(write_file(o.picture, picture_of(shares, o.model)));
    if (!o.exported.empty()) LONGKV_TRY(export_learned(file, o.exported));
  } else if (!o.picture.empty() || !o.exported.empty()) {
    return fail(Code::kInvalidArgument, "{}: neither a channel mask nor gates; --picture and --export are for those",
                o.model);
  }
  return print(text);
}

}  // namespace

void add_inspect(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand("inspect", "Show metadata and tensors of a GGUF file, a model or a mask");
  add_global_options(*command, o->global);
  command->add_option("-m,--model", o->model, "GGUF model file")->required();
  command->add_option("--picture", o->picture, "Of a mask or gates: SVG file to write, layers by KV heads");
  command->add_option("--export", o->exported,
                      "Of a mask or gates: file to write in the authors' form (.pth: torch tensor; else a table)");
  command->callback([o, &exit_code] { exit_code = report(run_inspect(*o)); });
}

}  // namespace longkv::cli
