// Tables as CSV and as Markdown.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "eval/summary.h"
#include "eval/text.h"

namespace longkv {

namespace {

std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  return "\"" + replace_all(text, "\"", "\"\"") + "\"";
}

std::string length_name(int64_t length) {
  if (length == 0) return "own length";
  return length % 1024 == 0 ? fmt::format("{}K", length / 1024) : std::to_string(length);
}

// "83 [67, 93]" in percent, or nats.
std::string score_text(const SummaryRow& row) {
  if (row.score.n == 0) return "skipped";
  if (row.lower_is_better) return fmt::format("{:.4f}", row.score.mean);
  return fmt::format("{:.0f} [{:.0f}, {:.0f}]", 100 * row.score.mean, 100 * row.score.low, 100 * row.score.high);
}

// Which harness this was, and what each recipe computed differently from full attention.
std::string harness_text(const Summary& summary) {
  std::vector<std::pair<std::string, std::vector<std::string>>> phases;
  for (const SummaryRow& r : summary.rows) {
    if (r.score.n == 0 || r.sparse == "none") continue;
    auto found = std::find_if(phases.begin(), phases.end(), [&](const auto& p) { return p.first == r.sparse; });
    if (found == phases.end()) found = phases.insert(phases.end(), {r.sparse, {}});
    if (std::find(found->second.begin(), found->second.end(), r.label) == found->second.end()) {
      found->second.push_back(r.label);
    }
  }
  if (summary.rows.empty()) return {};
  std::string out = summary.rows[0].question == "hidden"
                        ? "\nQuestion hidden until the document was read and compressed.\n"
                        : "\nQuestion seen while the document was read.\n";
  for (const auto& [phase, labels] : phases) {
    out += fmt::format("Unlike full attention in {}: {}.\n", phase, join(labels, ", "));
  }
  return out + reading_text(summary);
}

}  // namespace

std::string reading_text(const Summary& summary) {
  std::vector<std::pair<std::string, std::vector<std::string>>> readers;
  int64_t jobs = 1;
  for (const SummaryRow& r : summary.rows) {
    if (r.score.n == 0) continue;
    jobs = std::max(jobs, r.jobs);
    auto found = std::find_if(readers.begin(), readers.end(), [&](const auto& p) { return p.first == r.read_on; });
    if (found == readers.end()) found = readers.insert(readers.end(), {r.read_on, {}});
    if (std::find(found->second.begin(), found->second.end(), r.label) == found->second.end()) {
      found->second.push_back(r.label);
    }
  }
  std::string out;
  for (const auto& [reader, labels] : readers) {
    if (reader == "CPU" && readers.size() == 1) continue;
    // The first reader is full attention's, whose keys and values most recipes share.
    out += &reader == &readers.front().first
               ? fmt::format("Prompts were read on {}, every token was decoded on the CPU.\n", reader)
               : fmt::format("Prompts read on {}: {}.\n", reader, join(labels, ", "));
  }
  if (jobs > 1) {
    out += fmt::format(
        "Times are of {} prompts at once: they show what a recipe costs beside others, not what it takes alone.\n",
        jobs);
  }
  return out;
}

std::string summary_csv(const Summary& summary) {
  std::string out =
      "suite,task,version,length,kv_label,kv,question,sparse,metric,n,skipped,empty,flagged,score,score_low,score_high,"
      "difference,difference_low,difference_high,better,worse,sign_test_p,agreement,compared_tokens,kl_mean,kl_max,"
      "same_top,captured_mass,output_error,rows_attended,share_attended,bytes_per_token,kept_rows,kept_bytes,index_"
      "bytes,"
      "tokens_per_second,prefill_seconds,shared_prefill,read_on,jobs\n";
  for (const SummaryRow& r : summary.rows) {
    out += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},", csv_text(r.suite), csv_text(r.task), r.version,
                       r.length, csv_text(r.label), csv_text(r.kv), r.question, csv_text(r.sparse), r.metric, r.score.n,
                       r.skipped, r.empty, r.flagged);
    out += fmt::format("{:.6g},{:.6g},{:.6g},{:.6g},{:.6g},{:.6g},{},{},{:.6g},{:.6g},", r.score.mean, r.score.low,
                       r.score.high, r.against_full.difference, r.against_full.low, r.against_full.high,
                       r.against_full.better, r.against_full.worse, r.against_full.p, r.agreement);
    out += fmt::format("{},{:.6g},{:.6g},{:.6g},{:.6g},{:.6g},", r.compared, r.kl_mean, r.kl_max, r.same_top,
                       r.captured_mass, r.output_error);
    out += fmt::format("{:.1f},{:.6g},{:.0f},{:.1f},{:.0f},{:.0f},{:.4g},{:.4g},{},{},{}\n", r.rows_attended,
                       r.share_attended, r.bytes_per_token, r.kept_rows, r.kept_bytes, r.index_bytes,
                       r.tokens_per_second, r.prefill_seconds, r.shared_prefill ? 1 : 0, csv_text(r.read_on), r.jobs);
  }
  return out;
}

std::string summary_text(const Summary& summary) {
  std::string out;
  std::vector<int64_t> lengths;
  for (const SummaryRow& r : summary.rows) {
    if (std::find(lengths.begin(), lengths.end(), r.length) == lengths.end()) lengths.push_back(r.length);
  }
  for (const int64_t length : lengths) {
    std::vector<std::string> tasks;
    int64_t most = 0;
    for (const SummaryRow& r : summary.rows) {
      if (r.length != length) continue;
      most = std::max(most, r.score.n);
      if (std::find(tasks.begin(), tasks.end(), r.task) == tasks.end()) tasks.push_back(r.task);
    }
    std::vector<std::vector<std::string>> table;
    std::vector<std::string> head = {"recipe"};
    for (const std::string& task : tasks) {
      head.push_back(task == "perplexity" ? "perplexity (nats)" : task);
    }
    for (const char* column : {"mean", "largest drop", "+/- full", "p", "same text", "KL", "mass", "rows", "read KiB",
                               "held MiB", "tokens/s", "skipped"}) {
      head.emplace_back(column);
    }
    table.push_back(head);
    for (const TotalRow& t : summary.totals) {
      if (t.length != length) continue;
      std::vector<std::string> line = {t.label};
      const SummaryRow* any = nullptr;
      for (const std::string& task : tasks) {
        const auto row = std::find_if(summary.rows.begin(), summary.rows.end(), [&](const SummaryRow& r) {
          return r.length == length && r.task == task && r.kv == t.kv;
        });
        line.push_back(row == summary.rows.end() ? "-" : score_text(*row));
        if (row != summary.rows.end() && row->score.n > 0) any = &*row;
      }
      if (t.tasks > 0) {
        line.push_back(fmt::format("{:.1f} [{:.0f}, {:.0f}]", 100 * t.mean, 100 * t.low, 100 * t.high));
        line.push_back(t.largest_drop > 0 ? fmt::format("{:.0f} {}", 100 * t.largest_drop, t.largest_drop_task) : "0");
        line.push_back(fmt::format("{}/{}", t.better, t.worse));
        line.push_back(fmt::format("{:.2g}", t.p));
        line.push_back(fmt::format("{:.0f}%", 100 * t.agreement));
        line.push_back(fmt::format("{:.4f}", t.kl_mean));
        line.push_back(fmt::format("{:.3f}", t.captured_mass));
        line.push_back(fmt::format("{:.0f}", t.rows_attended));
        line.push_back(fmt::format("{:.0f}", t.bytes_per_token / 1024));
        line.push_back(fmt::format("{:.1f}", t.kept_bytes / 1048576));
        line.push_back(fmt::format("{:.0f}", t.tokens_per_second));
      } else if (any != nullptr) {
        for (const char* none : {"-", "-", "-", "-", "-"}) line.emplace_back(none);
        line.push_back(fmt::format("{:.4f}", any->kl_mean));
        line.push_back(fmt::format("{:.3f}", any->captured_mass));
        line.push_back(fmt::format("{:.0f}", any->rows_attended));
        line.push_back(fmt::format("{:.0f}", any->bytes_per_token / 1024));
        line.push_back(fmt::format("{:.1f}", (any->kept_bytes + any->index_bytes) / 1048576));
        line.push_back(fmt::format("{:.0f}", any->tokens_per_second));
      } else {
        for (int i = 0; i < 11; ++i) line.emplace_back("-");
      }
      line.push_back(std::to_string(t.skipped));
      table.push_back(std::move(line));
    }
    out += fmt::format("{}{}, at most {} samples a cell, percent with 95% intervals\n\n", out.empty() ? "" : "\n",
                       length_name(length), most);
    std::vector<size_t> width(head.size(), 3);
    for (const auto& line : table) {
      for (size_t i = 0; i < line.size(); ++i) width[i] = std::max(width[i], line[i].size());
    }
    for (size_t l = 0; l < table.size(); ++l) {
      for (size_t i = 0; i < head.size(); ++i) out += fmt::format("| {:<{}} ", table[l][i], width[i]);
      out += "|\n";
      if (l > 0) continue;
      for (size_t i = 0; i < head.size(); ++i) out += fmt::format("| {:-<{}} ", "", width[i]);
      out += "|\n";
    }
  }
  return out + harness_text(summary);
}

}  // namespace longkv
