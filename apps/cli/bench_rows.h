// Results of `longkv bench` and their output in llama-bench's formats, with longkv's columns added.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace longkv::cli {

struct BenchRow {
  std::string model_path, model_type;  // "llama 135M Q4_1"
  uint64_t model_bytes = 0, model_parameters = 0;
  int threads = 0;
  int64_t chunk = 0;
  std::string kv;        // canonical recipe
  std::string kv_label;  // as the user typed it
  std::string type_k, type_v;
  bool random_fill = false;  // the depth was marked as filled, not computed
  int64_t prompt = 0, generate = 0, depth = 0;
  std::string test_time;              // UTC
  std::vector<double> seconds;        // one a repetition
  double kv_bytes_per_token = 0;      // K, V and summaries read by a decoded token; 0 for prompt rows
  double weight_bytes_per_token = 0;  // matrices read by a decoded token; 0 for prompt rows
  double read_bandwidth = 0;          // bytes/s, measured by the built-in test; on a card what its makers say
  std::string backend = "CPU";        // or "CUDA"
  std::string card;                   // its name, where one computes
  int layers = 0;                     // of the model
  std::string products;               // of prompts: int8, bf16, f32; f16 on a card
  bool repacked = false;              // weights may lie in another order than in the file
  double bus_bytes_per_token = 0;     // fetched by a card from memory for a decoded token
  double blocks_found = 0;            // share of the attended blocks that lay on the card
  int64_t vram_peak = 0;              // bytes of the card, weights included
  int host_layers = 0;                // that lie in memory and the CPU decodes, beside a card
  int64_t streamed_bytes = 0;         // of their weights, over the bus for prompts, all repetitions

  std::string test_name() const;     // "pp512 @ d4096", "tg128", "pp512+tg128"
  double tokens_per_second() const;  // mean over repetitions
  double tokens_per_second_deviation() const;
  double bytes_per_second() const;  // 0 for prompt rows
};

enum class BenchFormat { kMarkdown, kCsv, kJson, kJsonLines };

// Text before the first row, of one row, and after the last.
std::string bench_header(BenchFormat format);
std::string bench_row(BenchFormat format, const BenchRow& row, bool first);
std::string bench_footer(BenchFormat format);

}  // namespace longkv::cli
