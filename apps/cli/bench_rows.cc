#include "bench_rows.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/cpu.h"
#include "base/version.h"
#include "output.h"

namespace longkv::cli {

namespace {

using Json = nlohmann::ordered_json;

double mean(const std::vector<double>& v) {
  double sum = 0;
  for (double x : v) sum += x;
  return v.empty() ? 0 : sum / double(v.size());
}

double deviation(const std::vector<double>& v) {
  if (v.size() < 2) return 0;
  const double m = mean(v);
  double sum = 0;
  for (double x : v) sum += (x - m) * (x - m);
  return std::sqrt(sum / double(v.size() - 1));
}

std::vector<double> rates(const BenchRow& r) {
  std::vector<double> ts;
  for (double s : r.seconds) ts.push_back(double(r.prompt + r.generate) / s);
  return ts;
}

// llama-bench's fields, with the value that says what happens here where longkv has no such setting, then ours.
Json to_json(const BenchRow& r) {
  std::vector<int64_t> ns;
  for (double s : r.seconds) ns.push_back(int64_t(s * 1e9));
  std::vector<double> ns_real(ns.begin(), ns.end());
  Json j;
  const bool card = r.backend.starts_with("CUDA");
  j["build_commit"] = build_commit();
  j["build_number"] = 0;  // commits are not counted
  j["cpu_info"] = cpu_model_name();
  j["gpu_info"] = r.card;
  j["backends"] = r.backend;
  j["model_filename"] = r.model_path;
  j["model_type"] = r.model_type;
  j["model_size"] = r.model_bytes;
  j["model_n_params"] = r.model_parameters;
  j["n_batch"] = r.chunk;
  j["n_ubatch"] = r.chunk;
  j["n_threads"] = r.threads;
  j["cpu_mask"] = "0x0";  // threads are bound to no core
  j["cpu_strict"] = false;
  j["poll"] = 50;  // workers spin for a while before they sleep
  j["type_k"] = r.type_k;
  j["type_v"] = r.type_v;
  j["n_gpu_layers"] = card ? r.layers - r.host_layers : 0;
  j["n_cpu_moe"] = 0;
  j["split_mode"] = "none";  // one card
  j["main_gpu"] = 0;
  j["no_kv_offload"] = card && r.backend.ends_with(",kv=cpu");
  j["flash_attn"] = 1;  // scores are never held whole
  j["devices"] = card ? "CUDA0" : "none";
  j["tensor_split"] = "0.00";
  j["tensor_buft_overrides"] = "none";
  j["load_mode"] = "mmap";
  j["lazy_mode"] = "auto";
  j["embeddings"] = false;
  j["no_op_offload"] = 0;
  j["no_host"] = false;
  j["repack"] = r.repacked;
  j["fit_target"] = 0;
  j["fit_min_ctx"] = 0;
  j["n_prompt"] = r.prompt;
  j["n_gen"] = r.generate;
  j["n_depth"] = r.depth;
  j["test_time"] = r.test_time;
  j["avg_ns"] = int64_t(mean(ns_real));
  j["stddev_ns"] = int64_t(deviation(ns_real));
  j["avg_ts"] = r.tokens_per_second();
  j["stddev_ts"] = r.tokens_per_second_deviation();
  j["kv"] = r.kv;
  j["isa"] = isa_name(active_isa());
  j["prefill_type"] = r.products;
  j["depth_fill"] = r.random_fill ? "random" : "computed";
  j["kv_bytes_per_token"] = r.kv_bytes_per_token;
  j["weight_bytes_per_token"] = r.weight_bytes_per_token;
  j["gb_per_s"] = r.bytes_per_second() / 1e9;
  j["read_bandwidth_gb_per_s"] = r.read_bandwidth / 1e9;
  j["bandwidth_share"] = r.read_bandwidth > 0 ? r.bytes_per_second() / r.read_bandwidth : 0.0;
  if (r.vram_peak > 0) j["vram_peak_bytes"] = r.vram_peak;
  if (r.host_layers > 0) {
    j["layers_in_memory"] = r.host_layers;
    j["streamed_weight_bytes"] = r.streamed_bytes;
  }
  if (r.bus_bytes_per_token > 0) {
    j["bus_bytes_per_token"] = r.bus_bytes_per_token;
    j["blocks_found_on_card"] = r.blocks_found;
  }
  j["samples_ns"] = ns;
  j["samples_ts"] = rates(r);
  return j;
}

std::string quoted(const Json& value) {
  std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  std::string out = "\"";
  for (char c : text) out += c == '"' ? "\"\"" : std::string(1, c);
  return out + "\"";
}

}  // namespace

std::string BenchRow::test_name() const {
  std::string name;
  if (prompt > 0) name += fmt::format("pp{}", prompt);
  if (generate > 0) name += fmt::format("{}tg{}", prompt > 0 ? "+" : "", generate);
  if (depth > 0) name += fmt::format(" @ d{}", depth);
  if (random_fill) name += " (random fill)";
  return name;
}

double BenchRow::tokens_per_second() const { return mean(rates(*this)); }
double BenchRow::tokens_per_second_deviation() const { return deviation(rates(*this)); }

double BenchRow::bytes_per_second() const {
  return prompt > 0 ? 0.0 : (kv_bytes_per_token + weight_bytes_per_token) * tokens_per_second();
}

std::string bench_header(BenchFormat format) {
  switch (format) {
    case BenchFormat::kMarkdown:
      return "| model                          |       size |     params | backend    | threads | kv                   "
             "|"
             "                           test |                  t/s |   KV B/tok |    GB/s | % of read bw |\n"
             "| ------------------------------ | ---------: | ---------: | ---------- | ------: | -------------------- "
             "|"
             " -----------------------------: | -------------------: | ---------: | ------: | -----------: |\n";
    case BenchFormat::kJson: return "[";
    case BenchFormat::kCsv:
    case BenchFormat::kJsonLines: return "";
  }
  return "";
}

std::string bench_row(BenchFormat format, const BenchRow& r, bool first) {
  const Json j = to_json(r);
  switch (format) {
    case BenchFormat::kMarkdown: {
      const bool decode = r.prompt == 0;
      return fmt::format(
          "| {:<30} | {:>6.2f} MiB | {:>8.2f} M | {:<10} | {:>7} | {:<20} | {:>30} | {:>20} | {:>10} | {:>7} | {:>12} "
          "|\n",
          r.model_type, double(r.model_bytes) / 1048576.0, double(r.model_parameters) / 1e6, r.backend, r.threads,
          r.kv_label, r.test_name(),
          fmt::format("{:.2f} ± {:.2f}", r.tokens_per_second(), r.tokens_per_second_deviation()),
          decode ? fmt::format("{:.0f}", r.kv_bytes_per_token) : "-",
          decode ? fmt::format("{:.2f}", r.bytes_per_second() / 1e9) : "-",
          decode && r.read_bandwidth > 0 ? fmt::format("{:.0f}", 100 * r.bytes_per_second() / r.read_bandwidth) : "-");
    }
    case BenchFormat::kCsv: {
      std::string names, values;
      for (const auto& [key, value] : j.items()) {
        if (value.is_array()) continue;
        names += (names.empty() ? "" : ",") + key;
        values += (values.empty() ? "" : ",") + quoted(value);
      }
      return (first ? names + "\n" : "") + values + "\n";
    }
    case BenchFormat::kJson: return (first ? "\n" : ",\n") + json_text(j);
    case BenchFormat::kJsonLines: return json_text(j, -1);
  }
  return "";
}

std::string bench_footer(BenchFormat format) { return format == BenchFormat::kJson ? "]\n" : ""; }

}  // namespace longkv::cli
