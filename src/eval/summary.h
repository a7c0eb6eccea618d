// Tables of results: every recipe against full attention on the same prompts.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "eval/statistics.h"
#include "eval/store.h"

namespace longkv {

// One recipe in one cell.
struct SummaryRow {
  std::string suite, task, metric, kv, label, question, sparse;
  int version = 1;
  int64_t length = 0;
  bool lower_is_better = false;                 // nats per token instead of a score
  int64_t skipped = 0, flagged = 0, empty = 0;  // flagged: answers that name more candidates than there are answers
  Interval score;
  Paired against_full;   // the recipe's score less full attention's
  double agreement = 0;  // share of answers with full attention's very text
  int64_t compared = 0;  // tokens behind the divergence
  double kl_mean = 0, kl_max = 0, same_top = 0;
  double captured_mass = 0, output_error = 0;
  std::vector<double> kl_buckets, layer_mass, head_mass;  // head_mass: [layers][kv_heads]
  std::string read_on;
  int64_t jobs = 1;
  // Equal budgets, in tokens and in bytes.
  double rows_attended = 0, share_attended = 0, bytes_per_token = 0, kept_rows = 0, kept_bytes = 0, index_bytes = 0;
  double tokens_per_second = 0, prefill_seconds = 0;
  bool shared_prefill = false;
};

// One recipe over all tasks of a length.
struct TotalRow {
  std::string kv, label;
  int64_t length = 0;
  int64_t tasks = 0, n = 0, skipped = 0;
  double mean = 0;                        // of the tasks' scores
  double low = 0, high = 0;               // 95% interval of it, from those of the tasks
  double smallest = 1, largest_drop = 0;  // of a task's score; of full attention's score less this one's
  std::string smallest_task, largest_drop_task;
  int64_t better = 0, worse = 0;
  double p = 1;  // sign test over all samples
  double agreement = 0, kl_mean = 0, captured_mass = 0, rows_attended = 0, bytes_per_token = 0, kept_bytes = 0;
  double tokens_per_second = 0;
};

struct Summary {
  std::vector<SummaryRow> rows;  // by length, task, recipe, each in the order of first appearance; full comes first
  std::vector<TotalRow> totals;
};

Summary summarise(std::span<const EvalRecord> records);
std::string summary_csv(const Summary& summary);
// Tables for a terminal and for Markdown: one a length, a column a task.
std::string summary_text(const Summary& summary);
// What read the prompts, where that was not the CPU that decoded, and how far times can be trusted: a sentence a line.
std::string reading_text(const Summary& summary);

}  // namespace longkv
