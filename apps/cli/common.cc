#include "common.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <utility>

#include "base/bandwidth.h"
#include "base/cpu.h"
#include "base/disk_space.h"
#include "base/error.h"
#include "base/inputs.h"
#include "base/log.h"
#include "base/print_line.h"
#include "base/utf8.h"
#include "card.h"
#include "help.h"
#include "interrupt.h"
#include "ops/matmul.h"
#include "planning.h"

namespace longkv::cli {

namespace {
constexpr int64_t kDefaultChunk = 512;
}  // namespace

double read_bandwidth(ThreadPool& pool, const std::atomic<bool>* cancel) {
  // Well above the last-level cache, and no more: the first touch of memory that a virtual machine gave back to its
  // host can take seconds for each 100 MB.
  const auto bytes = size_t(std::max<int64_t>(int64_t(64) << 20, 4 * int64_t(last_level_cache_bytes())));
  if (available_ram_bytes() < 2 * int64_t(bytes)) return 0;
  constexpr int kPasses = 9;
  const auto measured = measure_read_bandwidth(pool, bytes, kPasses, cancel);
  return measured.ok() ? measured->median * 1e9 : 0.0;
}

int report(const Status& status) {
  if (status.ok()) return 0;
  if (pipe_was_closed()) return 1;  // the reader has what it wanted
  print_line("error: " + status.message());
  return status.code() == Code::kInvalidArgument ? 2 : 1;
}

void add_global_options(CLI::App& command, GlobalOptions& o) {
  command.add_option("--isa", o.isa, "Instruction-set level (see 'longkv version'); also LONGKV_ISA")
      ->envname("LONGKV_ISA")
      ->group(kMore);
  command.add_flag("--strict", o.strict, "Make every notice (fallback, rounding, ignored setting) an error");
  CLI::Option* verbose = command.add_flag("-v,--verbose", o.verbose, "Print more to standard error");
  command.add_flag("-q,--quiet", o.quiet, "Print only errors and notices to standard error")->excludes(verbose);
  command.add_flag("--json", o.json, "Print results as JSON");
}

void add_model_options(CLI::App& command, ModelOptions& o, bool with_recipe) {
  command.add_option("-m,--model", o.model, "GGUF model file (first shard of a split model)")->required();
  command.add_option("-t,--threads", o.threads, "Threads; default: physical cores of one NUMA node")
      ->check(CLI::Range(1, 4096));
  command.add_option("-c,--ctx-size", o.context,
                     "Context in tokens (K, M allowed); default: what fits, at most as trained");
  command.add_option("--ubatch-size,--ub", o.chunk, "Prompt tokens that pass a layer together")
      ->check(CLI::Range(int64_t(1), int64_t(1) << 20))
      ->default_str(std::to_string(kDefaultChunk))
      ->group(kMore);
  command
      .add_option(
          "--prefill-type", o.prefill_type,
          "Products of prompts: int8, f32, bf16 or auto, bf16 on AMX and else int8 (decode follows: int8 or f32)")
      ->check(CLI::IsMember({"auto", "int8", "f32", "bf16"}))
      ->capture_default_str()
      ->group(kMore);
  command
      .add_flag("--no-repack", o.no_repack,
                "Read weights as they lie in the file: less to do at the start, slower decode")
      ->group(kMore);
  command.add_option("--prefill-order", o.prefill_order, "Prompt schedule: layer (major) or chunk (major)")
      ->check(CLI::IsMember({"layer", "chunk"}))
      ->capture_default_str()
      ->group(kMore);
  if (with_recipe) {
    command.add_option("--kv", o.kv, "KV recipe, e.g. full, quest:budget=1024")->default_str("full");
    command.add_option("--kv-config", o.kv_config, "KTransformers config.yaml to take the recipe from")->group(kMore);
  }
  command.add_option("--cache-type-k,--ctk", o.type_k, "Type of stored keys: f32, f16, bf16, q8_0, q4_0, fp8");
  command.add_option("--cache-type-v,--ctv", o.type_v, "Type of stored values");
  command.add_option("--flash-attn,--fa", o.flash_attn, "Accepted and ignored: there is one attention path")
      ->group(kMore);
  command.add_option("-b,--batch-size", o.batch, "Accepted and ignored: --ubatch-size alone sets the pieces")
      ->group(kMore);
  add_card_options(command, o);
  command.add_option("--rope-scaling", o.rope_scaling, "Override: none, linear, ntk, yarn, longrope")
      ->check(CLI::IsMember({"none", "linear", "ntk", "yarn", "longrope"}))
      ->group(kMore);
  command.add_option("--rope-scale", o.rope_scale, "Override of the RoPE scaling factor")->group(kMore);
  command.add_option("--rope-freq-base", o.rope_base, "Override of the RoPE base")->group(kMore);
  command.add_option("--yarn-orig-ctx", o.yarn_original_context, "Override of YaRN's original context")->group(kMore);
}

Status apply_global_options(const GlobalOptions& o) {
  set_strict(o.strict);
  set_log_level(o.quiet ? LogLevel::kQuiet : o.verbose ? LogLevel::kVerbose : LogLevel::kInfo);
  if (!o.isa.empty()) {
    const auto level = parse_isa(o.isa);
    if (!level) {
      std::string known;
      for (IsaLevel l : available_isa_levels()) known += (known.empty() ? "" : ", ") + std::string(isa_name(l));
      return fail(Code::kInvalidArgument, "instruction-set level '{}' is not known; this machine has {}", o.isa, known);
    }
    LONGKV_TRY(set_active_isa(*level));
  }
  return {};
}

Result<int64_t> parse_size(const std::string& text, const std::string& option) {
  char* end = nullptr;
  errno = 0;
  const long long number = std::strtoll(text.c_str(), &end, 10);
  int64_t unit = 1;
  if (end != text.c_str() && *end != '\0' && end[1] == '\0') {
    switch (*end) {
      case 'k':
      case 'K': unit = int64_t(1) << 10; break;
      case 'm':
      case 'M': unit = int64_t(1) << 20; break;
      case 'g':
      case 'G': unit = int64_t(1) << 30; break;
      default: unit = 0;
    }
  } else if (*end != '\0') {
    unit = 0;
  }
  // What is no digit first would be skipped as a blank or read as a sign.
  if (end == text.c_str() || unit == 0 || number < 0 || text.front() < '0' || text.front() > '9')
    return fail(Code::kInvalidArgument, "{} '{}' must be a number, optionally with K, M or G", option, text);
  int64_t value = 0;
  if (errno != 0 || __builtin_mul_overflow(int64_t(number), unit, &value)) {
    return fail(Code::kInvalidArgument, "{} '{}' is out of range; at most {} (K, M and G are powers of 1024)", option,
                text, std::numeric_limits<int64_t>::max());
  }
  return value;
}

Result<std::string> read_file(const std::string& path, uint64_t limit, bool until_zero) {
  const std::unique_ptr<FILE, int (*)(FILE*)> opened(path == "-" ? nullptr : std::fopen(path.c_str(), "rbe"),
                                                     [](FILE* f) { return f == nullptr ? 0 : std::fclose(f); });
  FILE* in = path == "-" ? stdin : opened.get();
  if (in != nullptr && in != stdin) note_input(path);
  if (in == nullptr) return fail(Code::kIo, "cannot open '{}': {}", path, std::strerror(errno));
  std::string text;
  char buffer[1 << 16];
  while (const size_t n = std::fread(buffer, 1, sizeof(buffer), in)) {
    text.append(buffer, n);
    if (until_zero && std::memchr(buffer, 0, n) != nullptr) return text;
    if (text.size() > limit) return fail(Code::kInvalidArgument, "'{}' is larger than {} bytes", path, limit);
  }
  if (std::ferror(in) != 0) return fail(Code::kIo, "cannot read '{}': {}", path, std::strerror(errno));
  return text;
}

Result<std::string> read_text_file(const std::string& path, bool may_be_empty) {
  LONGKV_ASSIGN(std::string text, read_file(path, Tokenizer::kMaxTextBytes, /*until_zero=*/true));
  const std::string what = path == "-" ? "standard input" : "'" + path + "'";
  if (text.empty() && !may_be_empty) return fail(Code::kInvalidArgument, "{} is empty", what);
  LONGKV_TRY(check_utf8(text, what));
  return text;
}

Status check_utf8(const std::string& text, const std::string& what) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.data() + i, text.size() - i);
    if (c.code == 0) {
      return fail(Code::kInvalidArgument, "{} is binary or UTF-16, not UTF-8 text: byte 0 at offset {}", what, i);
    }
    if (!c.valid) {
      return fail(Code::kInvalidArgument, "{} is not UTF-8: byte 0x{:02x} at offset {}; convert it first (iconv)", what,
                  uint8_t(text[i]), i);
    }
    i += c.length;
  }
  return {};
}

namespace {

RopeOverrides rope_overrides(const ModelOptions& o) {
  RopeOverrides r;
  if (o.rope_scaling == "none") r.scaling = RopeScaling::kNone;
  if (o.rope_scaling == "linear") r.scaling = RopeScaling::kLinear;
  if (o.rope_scaling == "ntk") r.scaling = RopeScaling::kNtk;
  if (o.rope_scaling == "yarn") r.scaling = RopeScaling::kYarn;
  if (o.rope_scaling == "longrope") r.scaling = RopeScaling::kLongRope;
  r.factor = o.rope_scale;
  r.base = o.rope_base;
  r.original_context = o.yarn_original_context;
  return r;
}

// A type that the recipe asks for itself is only replaced with a notice; f16 is what it has without being asked.
Status override_store(const std::string& name, const char* option, bool from_file, KvType& type) {
  if (name.empty()) return {};
  const auto parsed = parse_kv_type(name);
  if (!parsed || kv_type_blocked(*parsed)) {
    return fail(Code::kInvalidArgument,
                "{} '{}' must be one of f32, f16, bf16, q8_0, q4_0, fp8; kivi2 and kivi4 are recipes (--kv kivi2)",
                option, name);
  }
  const KvType asked = std::exchange(type, *parsed);
  if (asked == type || (asked == KvType::kF16 && !from_file)) return {};
  return notice(fmt::format("{} {} is used, not {} of the recipe", option, name, kv_type_name(asked)));
}

}  // namespace

namespace {

// Where a cache on disk is to lie.
Status choose_disk(const ModelOptions& o, Opened& opened) {
  if (!o.can_use_disk && !o.plans_card)
    return fail(Code::kInvalidArgument, "--kv-place disk: this command holds its KV cache in memory");
  const char* temporary = std::getenv("TMPDIR");
  opened.kv_dir = !o.kv_dir.empty() ? o.kv_dir : temporary != nullptr && *temporary != 0 ? temporary : "/var/tmp";
  LONGKV_TRY(DiskSpace::create(opened.kv_dir).status());  // before any work
  if (DiskSpace::in_memory(opened.kv_dir)) {
    LONGKV_TRY(notice(fmt::format(
        "'{}' lies in memory, so a KV cache there spares none; name a folder on a disk with --kv-dir", opened.kv_dir)));
  }
  opened.disk_bytes = std::max<int64_t>(1, DiskSpace::free_bytes(opened.kv_dir));
  return {};
}

}  // namespace

Result<Opened> open_model(const ModelOptions& o, bool must_fit) {
  Opened opened;
  if (o.kv && !o.kv_config.empty())
    return fail(Code::kInvalidArgument, "--kv and --kv-config both name a recipe; give one");
  int threads = o.threads;
  if (!o.context.empty()) {
    LONGKV_ASSIGN(opened.context, parse_size(o.context, "--ctx-size"));
  }
  opened.chunk = o.chunk.value_or(kDefaultChunk);
  if (o.kv_config.empty()) {
    LONGKV_ASSIGN(opened.recipe, load_recipe(o.kv.value_or("full")));
  } else {
    LONGKV_ASSIGN(const KTransformersConfig config, load_ktransformers_yaml(o.kv_config));
    opened.recipe = config.recipe;
    const auto settle = [](int64_t& value, bool given, const char* option, int64_t in_file, const char* key) {
      if (!given || in_file <= 0) value = in_file > 0 ? in_file : value;
      return given && in_file > 0 && value != in_file
                 ? notice(fmt::format("{} {} is used, not {}={} of --kv-config", option, value, key, in_file))
                 : Status();
    };
    int64_t wanted_threads = threads;
    LONGKV_TRY(settle(opened.context, !o.context.empty(), "--ctx-size", config.max_seq_len, "max_seq_len"));
    LONGKV_TRY(settle(opened.chunk, o.chunk.has_value(), "--ubatch-size", config.chunk_size, "chunk_size"));
    LONGKV_TRY(settle(wanted_threads, threads > 0, "--threads", config.threads, "threads_num"));
    threads = int(wanted_threads);
  }
  const bool from_file = !o.kv_config.empty();
  LONGKV_TRY(override_store(o.type_k, "--cache-type-k", from_file, opened.recipe.store.k));
  LONGKV_TRY(override_store(o.type_v, "--cache-type-v", from_file, opened.recipe.store.v));
  LONGKV_TRY(validate_recipe(opened.recipe));
  if (!o.batch.empty()) LONGKV_TRY(notice("--batch-size is ignored: --ubatch-size alone sets how a prompt is cut"));
  if (!o.flash_attn.empty()) LONGKV_TRY(notice("--flash-attn is ignored: longkv has one attention path"));
  opened.products = o.prefill_type == "f32"    ? ProductType::kF32
                    : o.prefill_type == "bf16" ? ProductType::kBf16
                    : o.prefill_type == "int8" ? ProductType::kInt8
                                               : default_products();
  if (!Matmul::supports(opened.products)) {
    LONGKV_TRY(notice("bf16 products need a CPU with AMX, or with AVX-512 and oneDNN; prompts are multiplied in fp32"));
    opened.products = ProductType::kF32;
  }
  for (const std::string& note : opened.recipe.notes) LONGKV_TRY(notice(opened.recipe.name + ": " + note));
  opened.order = o.prefill_order == "chunk" ? PrefillOrder::kChunkMajor : PrefillOrder::kLayerMajor;
  LONGKV_ASSIGN(const std::shared_ptr<LoadedModel> model, LoadedModel::load(o.model, rope_overrides(o)));
  opened.model = model;
  LONGKV_TRY(note_misfits(opened.recipe, *model));
  if (threads == 0) threads = default_threads();
  opened.pool = std::make_unique<ThreadPool>(threads);
  if (opened.pool->threads() < threads) {
    return fail(Code::kOutOfMemory, "the system lets longkv start {} of {} threads; use -t {}", opened.pool->threads(),
                threads, opened.pool->threads());
  }
  PlanLimits limits;
  if (o.kv_place == "disk") {
    LONGKV_TRY(choose_disk(o, opened));
    limits.disk_bytes = opened.disk_bytes;
  } else if (!o.kv_dir.empty()) {
    LONGKV_TRY(notice("--kv-dir is ignored: only --kv-place disk uses it"));
  }
  LONGKV_ASSIGN(const KvPlan plan,
                plan_for(*opened.model, opened.recipe, opened.context, opened.chunk, opened.pool->threads(), limits));
  opened.asked_context = std::exchange(opened.context, plan.context);
  if (must_fit || o.card_reads) {
    LONGKV_TRY(choose_card(o, plan, opened));
  } else if (card_wanted(o) && !o.plans_card) {
    return fail(Code::kInvalidArgument, "this shows what the CPU needs; leave -ngl, --device and --kv-place out");
  }
  if (!o.vram.empty() && !opened.card && !o.plans_card) LONGKV_TRY(notice("--vram is ignored: the CPU runs this"));
  if (must_fit && opened.rows_in_memory()) LONGKV_TRY(check_plan(plan));
  // What the CPU decodes.
  const int layers_here = opened.card && (opened.card_decodes || o.learn_chunk > 0) ? opened.card->host_layers() : -1;
  if (must_fit && layers_here != 0 && opened.products != ProductType::kF32 && !o.no_repack) {
    LONGKV_TRY(model->pack_weights(*opened.pool, layers_here));
    if (model->packed_bytes() > 0) log_verbose("{} MiB of weights packed for decode", model->packed_bytes() >> 20);
  }
  const int dense = opened.recipe.select.dense_layers, layers = int(opened.model->config().layers);
  if (!opened.recipe.select.all && dense >= layers) {
    LONGKV_TRY(
        notice(fmt::format("dense_layers={} of a model of {} layers: no layer chooses what it reads", dense, layers)));
  }
  if (opened.context > opened.model->config().context) {
    LONGKV_TRY(
        notice(fmt::format("the context of {} tokens is beyond the {} that the model was trained for; quality may fall",
                           opened.context, opened.model->config().context)));
  }
  return opened;
}

Result<Tokenizer> tokenizer_of(const GgufFile& file, std::string_view override_pre) {
  auto tokenizer = Tokenizer::from_metadata(file.metadata(), override_pre);
  if (!tokenizer.ok()) return tokenizer.status().with_context(file.path());
  return tokenizer;
}

Status check_outputs_differ(const std::vector<std::pair<const char*, std::string>>& outputs) {
  std::map<std::filesystem::path, const char*> seen;
  for (const auto& [option, path] : outputs) {
    std::error_code error;
    // Devices take what several write.
    if (path.empty() || (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error)))
      continue;
    auto place = std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
    if (error) place = path;
    const auto [it, added] = seen.emplace(place, option);
    if (!added) {
      return fail(Code::kInvalidArgument, "{} and {} both name '{}', where only one can be kept; name two files",
                  it->second, option, path);
    }
  }
  return {};
}

Result<std::unique_ptr<Session>> make_session(const Opened& opened, int64_t context) {
  SessionOptions s;
  s.context = context > 0 ? context : opened.context;
  s.recipe = opened.recipe;
  s.products = opened.products;
  s.chunk = opened.chunk;
  s.order = opened.order;
  s.card = opened.card;
  s.card_kv = opened.card_kv;
  s.card_hybrid = opened.card_hybrid;
  s.card_decodes = opened.card_decodes;
  s.card_chunk = opened.card_chunk;
  if (!opened.kv_dir.empty()) {
    LONGKV_ASSIGN(s.kv_disk, DiskSpace::create(opened.kv_dir));
  }
  auto session = Session::create(opened.model, s, *opened.pool);
  if (session.ok() || !s.card) return session;
  if (opened.card_asked)
    return with_card_hint(opened, s.context, session.status(), s.card->vram_cap(), s.card->device());
  log_info("the CPU runs this: {}", session.status().message());
  s.card = nullptr;
  return Session::create(opened.model, s, *opened.pool);
}

}  // namespace longkv::cli
