#include "eval/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "eval/report_plots.h"
#include "eval/svg.h"
#include "eval/text.h"

namespace longkv {

namespace {

constexpr const char* kStyle =
    "body{font:15px/1.45 sans-serif;margin:24px auto;max-width:1240px;padding:0 16px;color:#222}"
    "table{border-collapse:collapse;font-size:13px;margin:8px 0 20px}"
    "th,td{border:1px solid #ccc;padding:3px 8px;text-align:right}th{background:#f3f3f3}"
    "td{white-space:nowrap}td:first-child,th:first-child{text-align:left}svg{margin:6px 14px 6px 0;vertical-align:top}"
    ".drop{color:#b00020;font-weight:bold}.wrap{overflow-x:auto}code{background:#f3f3f3;padding:1px 4px}";

std::string length_text(int64_t length) {
  if (length == 0) return "prompts of their own length";
  return length % 1024 == 0 ? fmt::format("{}K tokens", length / 1024) : fmt::format("{} tokens", length);
}

std::string length_name(int64_t length) {
  return length % 1024 == 0 && length > 0 ? fmt::format("{}K", length / 1024) : std::to_string(length);
}

std::string percent(double share) { return fmt::format("{:.1f}", 100 * share); }

// Every cell in detail: what the overview averages away.
std::string detail_table(const Summary& summary, int64_t length) {
  std::string out =
      "<div class=\"wrap\"><table><tr><th>task</th><th>recipe</th><th>n</th><th>score</th><th>95%</th><th>less "
      "full</th>"
      "<th>95%</th><th>better / worse</th><th>sign test p</th><th>same text</th><th>KL</th><th>KL max</th><th>mass</th>"
      "<th>error</th><th>rows</th><th>share</th><th>read KiB</th><th>held MiB</th><th>tokens/s</th><th>skipped</th>"
      "<th>flagged</th></tr>\n";
  for (const SummaryRow& r : summary.rows) {
    if (r.length != length) continue;
    const double scale = r.lower_is_better ? 1 : 100;
    const auto number = [&](double v) {
      return r.lower_is_better ? fmt::format("{:.4f}", v) : fmt::format("{:.1f}", v * scale);
    };
    const bool drop = r.against_full.p < 0.05 && r.against_full.worse > r.against_full.better && !r.lower_is_better;
    out += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td>", escape_html(r.task), escape_html(r.label), r.score.n);
    if (r.score.n == 0) {
      out += fmt::format("<td colspan=\"16\">skipped</td><td>{}</td><td></td></tr>\n", r.skipped);
      continue;
    }
    out += fmt::format("<td>{}</td><td>{} to {}</td><td{}>{}</td><td>{} to {}</td><td>{} / {}</td><td>{:.2g}</td>",
                       number(r.score.mean), number(r.score.low), number(r.score.high), drop ? " class=\"drop\"" : "",
                       number(r.against_full.difference), number(r.against_full.low), number(r.against_full.high),
                       r.against_full.better, r.against_full.worse, r.against_full.p);
    out += fmt::format(
        "<td>{}%</td><td>{:.4f}</td><td>{:.3f}</td><td>{:.3f}</td><td>{:.3f}</td><td>{:.0f}</td><td>{}%</td>",
        percent(r.agreement), r.kl_mean, r.kl_max, r.captured_mass, r.output_error, r.rows_attended,
        percent(r.share_attended));
    out += fmt::format("<td>{:.0f}</td><td>{:.1f}</td><td>{:.0f}</td><td>{}</td><td>{}</td></tr>\n",
                       r.bytes_per_token / 1024, (r.kept_bytes + r.index_bytes) / 1048576, r.tokens_per_second,
                       r.skipped, r.flagged);
  }
  return out + "</table></div>\n";
}

std::string overview(const Summary& summary, int64_t length) {
  std::string out =
      "<div class=\"wrap\"><table><tr><th>recipe</th><th>tasks</th><th>answers</th><th>mean score</th><th>smallest "
      "task</th>"
      "<th>largest drop</th><th>better / worse than full</th><th>sign test p</th><th>same "
      "text</th><th>KL</th><th>mass</th>"
      "<th>rows read</th><th>KiB read a token</th><th>MiB held</th><th>tokens/s</th><th>skipped</th></tr>\n";
  for (const TotalRow& t : summary.totals) {
    if (t.length != length || t.tasks == 0) continue;
    const bool drop = t.p < 0.05 && t.worse > t.better;
    out += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td{}>{}</td><td>{} {}</td><td>{}</td>",
                       escape_html(t.label), t.tasks, t.n, drop ? " class=\"drop\"" : "",
                       fmt::format("{} [{:.0f}, {:.0f}]", percent(t.mean), 100 * t.low, 100 * t.high),
                       percent(t.smallest), escape_html(t.smallest_task),
                       t.largest_drop > 0 ? percent(t.largest_drop) + " " + escape_html(t.largest_drop_task) : "0");
    out += fmt::format("<td>{} / {}</td><td>{:.2g}</td><td>{}%</td><td>{:.4f}</td><td>{:.3f}</td><td>{:.0f}</td>",
                       t.better, t.worse, t.p, percent(t.agreement), t.kl_mean, t.captured_mass, t.rows_attended);
    out += fmt::format("<td>{:.0f}</td><td>{:.1f}</td><td>{:.0f}</td><td>{}</td></tr>\n", t.bytes_per_token / 1024,
                       t.kept_bytes / 1048576, t.tokens_per_second, t.skipped);
  }
  return out + "</table></div>\n";
}

std::string run_table(const EvalRunInfo& info) {
  std::string out = "<table>\n";
  const auto add = [&](const std::string& name, const EvalRunInfo& value) {
    out += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escape_html(name),
                       escape_html(value.is_string() ? value.get<std::string>() : value.dump()));
  };
  for (const auto& [name, value] : info.items()) {
    if (name != "note") {
      add(name, value);
    } else {
      for (const auto& [key, note] : value.items()) add(key, note);
    }
  }
  return out + "</table>\n";
}

}  // namespace

BudgetLabel split_budget(const std::string& label) {
  const size_t at = label.find("budget=");
  if (at == std::string::npos) return {label, 0};
  size_t end = at + 7;
  int64_t budget = 0;
  const auto [rest, error] = std::from_chars(label.data() + end, label.data() + label.size(), budget);
  if (error != std::errc() || budget <= 0) return {label, 0};
  end = size_t(rest - label.data());
  if (end < label.size() && (label[end] == 'K' || label[end] == 'k')) {
    budget *= 1024;
    ++end;
  }
  std::string family = label.substr(0, at) + label.substr(end);
  for (const char* left : {":,", "(,"}) {
    if (const size_t i = family.find(left); i != std::string::npos) family.erase(i + 1, 1);
  }
  while (!family.empty() && (family.back() == ',' || family.back() == ':')) family.pop_back();
  return {family, budget};
}

std::vector<ReportPlot> report_plots(std::span<const EvalRecord> records, const Summary& summary) {
  std::vector<ReportPlot> plots;
  const auto add = [&](std::string name, std::string svg) {
    if (!svg.empty()) plots.push_back({std::move(name), std::move(svg)});
  };
  std::vector<int64_t> lengths;
  for (const SummaryRow& r : summary.rows) {
    if (std::find(lengths.begin(), lengths.end(), r.length) == lengths.end()) lengths.push_back(r.length);
  }
  for (const int64_t length : lengths) {
    const std::string of = length_name(length);
    add("tasks-" + of, plot_tasks(summary, length));
    add("budget-" + of, plot_budgets(summary, length, ""));
    std::vector<std::string> tasks;
    for (const SummaryRow& r : summary.rows) {
      if (r.length == length && std::find(tasks.begin(), tasks.end(), r.task) == tasks.end()) tasks.push_back(r.task);
    }
    for (const std::string& task : tasks) {
      if (tasks.size() > 1) add(fmt::format("budget-{}-{}", of, task), plot_budgets(summary, length, task));
    }
    add("bytes-" + of, plot_bytes(summary, length));
    add("speed-" + of, plot_speed(summary, length));
    add("mass-" + of, plot_mass(summary, length));
    add("divergence-" + of, plot_divergence(summary, length));
  }
  for (std::string& panel : plot_needles(records, summary)) add("needles-depth", std::move(panel));
  add("decode-cost", plot_cost(summary, CostPlot::kDecode));
  add("first_token-cost", plot_cost(summary, CostPlot::kFirstToken));
  add("memory-cost", plot_cost(summary, CostPlot::kMemory));
  return plots;
}

std::string report_html(const EvalRunInfo& info, std::span<const EvalRecord> records, const Summary& summary) {
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>longkv eval</title><style>" +
      std::string(kStyle) + "</style></head><body>\n<h1>longkv eval: " + escape_html(info.value("model", "")) +
      "</h1>\n";
  const bool hidden = info.value("question", "hidden") == "hidden";
  out += fmt::format(
      "<p>Every recipe answered the same prompts as full attention. {} Intervals hold 95%; p is an exact sign test "
      "over "
      "paired answers; a red score is below full attention's with p under 0.05. KL and captured mass compare with full "
      "attention up to the first different token.</p>\n",
      hidden ? "The question was <b>hidden</b> until the document had been read and compressed; recipes acted on the "
               "question "
               "and the answer."
             : "The question was <b>seen</b> while the document was read: recipes acted on the answer alone.");
  out += "<p>" + escape_html(replace_all(reading_text(summary), "\n", " ")) + "</p>\n";
  std::vector<int64_t> lengths;
  for (const SummaryRow& r : summary.rows) {
    if (std::find(lengths.begin(), lengths.end(), r.length) == lengths.end()) lengths.push_back(r.length);
  }
  const std::vector<ReportPlot> plots = report_plots(records, summary);
  const auto panels = [&](const std::string& suffix) {
    std::string text;
    for (const ReportPlot& plot : plots) {
      const size_t dash = plot.name.find('-');
      const std::string of = dash == std::string::npos ? "" : plot.name.substr(dash + 1);
      if (of == suffix || of.starts_with(suffix + "-")) text += plot.svg;
    }
    return text;
  };
  for (const int64_t length : lengths) {
    out += "<h2>" + length_text(length) + "</h2>\n" + overview(summary, length) + panels(length_name(length));
    out += "<details><summary>every task and recipe</summary>\n" + detail_table(summary, length) + "</details>\n";
  }
  const std::string needles = panels("depth"), costs = panels("cost");
  if (!needles.empty()) out += "<h2>Where facts are found</h2>\n" + heat_legend() + "<br>\n" + needles;
  if (!costs.empty()) out += "<h2>Cost against depth</h2>\n" + costs;
  return out + "<h2>Run</h2>\n" + run_table(info) + "</body></html>\n";
}

nlohmann::ordered_json summary_json(const Summary& summary) {
  nlohmann::ordered_json j;
  j["cells"] = nlohmann::ordered_json::array();
  for (const SummaryRow& r : summary.rows) {
    nlohmann::ordered_json row;
    row["suite"] = r.suite;
    row["task"] = r.task;
    row["length"] = r.length;
    row["kv"] = r.kv;
    row["kv_label"] = r.label;
    row["question"] = r.question;
    row["sparse"] = r.sparse;
    row["n"] = r.score.n;
    row["skipped"] = r.skipped;
    row["score"] = r.score.mean;
    row["score_low"] = r.score.low;
    row["score_high"] = r.score.high;
    row["difference"] = r.against_full.difference;
    row["better"] = r.against_full.better;
    row["worse"] = r.against_full.worse;
    row["sign_test_p"] = r.against_full.p;
    row["agreement"] = r.agreement;
    row["kl_mean"] = r.kl_mean;
    row["captured_mass"] = r.captured_mass;
    row["rows_attended"] = r.rows_attended;
    row["bytes_per_token"] = r.bytes_per_token;
    row["tokens_per_second"] = r.tokens_per_second;
    j["cells"].push_back(std::move(row));
  }
  j["totals"] = nlohmann::ordered_json::array();
  for (const TotalRow& t : summary.totals) {
    nlohmann::ordered_json row;
    row["length"] = t.length;
    row["kv"] = t.kv;
    row["kv_label"] = t.label;
    row["tasks"] = t.tasks;
    row["mean"] = t.mean;
    row["smallest_task"] = t.smallest_task;
    row["largest_drop"] = t.largest_drop;
    row["largest_drop_task"] = t.largest_drop_task;
    row["better"] = t.better;
    row["worse"] = t.worse;
    row["sign_test_p"] = t.p;
    j["totals"].push_back(std::move(row));
  }
  return j;
}

}  // namespace longkv
