#include "eval/report_plots.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "eval/report.h"
#include "eval/svg.h"

namespace longkv {

namespace {

std::string tokens_text(int64_t n) { return n % 1024 == 0 && n > 0 ? fmt::format("{}K", n / 1024) : std::to_string(n); }

template <class T>
void add_new(std::vector<T>& list, const T& value) {
  if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
}

bool is_noise(const TotalRow& t) { return t.kv.find('@') != std::string::npos; }

// Recipes against a cost, of which less (or more) is better, with the line of those that none beats in both.
std::string trade_off(const std::string& title, const PlotAxis& x,
                      const std::vector<std::pair<std::string, std::pair<double, double>>>& points,
                      bool less_is_better) {
  std::vector<PlotSeries> series;
  for (const auto& [name, point] : points) series.push_back({name, {point}, {}, false, false, true, name});
  auto sorted = points;
  std::stable_sort(sorted.begin(), sorted.end(), [&](const auto& a, const auto& b) {
    return less_is_better ? a.second.first < b.second.first : a.second.first > b.second.first;
  });
  PlotSeries front;
  front.name = "none is better in both";
  front.dashed = true;
  front.marks = false;
  double best = -1;
  for (const auto& [name, point] : sorted) {
    if (point.second > best) {
      front.points.push_back(point);
      best = point.second;
    }
  }
  series.push_back(std::move(front));
  return line_plot(title, x, {"mean score, %", false, false, 0, 100}, series);
}

}  // namespace

std::vector<std::string> report_labels(const Summary& summary) {
  std::vector<std::string> labels;
  for (const SummaryRow& r : summary.rows) add_new(labels, r.label);
  return labels;
}

std::string plot_needles(std::span<const EvalRecord> records, const Summary& summary) {
  std::set<int64_t> lengths;
  std::set<double> depths;
  std::map<std::tuple<std::string, double, int64_t>, std::pair<double, int64_t>> cells;
  std::map<std::string, std::pair<double, int64_t>> means;
  for (const EvalRecord& r : records) {
    if (r.depth < 0 || !r.skipped.empty() || r.metric == "nll") continue;
    lengths.insert(r.length);
    depths.insert(r.depth);
    auto& cell = cells[{r.label, r.depth, r.length}];
    cell.first += r.score;
    ++cell.second;
    auto& mean = means[r.label];
    mean.first += r.score;
    ++mean.second;
  }
  std::string out;
  for (const std::string& label : report_labels(summary)) {
    const auto mean = means.find(label);
    if (mean == means.end()) continue;
    HeatMap map;
    map.title = fmt::format("{}: {:.1f}%", label, 100 * mean->second.first / double(mean->second.second));
    map.x_title = "tokens";
    map.y_title = "depth, %";
    for (const int64_t length : lengths) map.columns.push_back(tokens_text(length));
    for (const double depth : depths) {
      map.rows.push_back(fmt::format("{:g}", depth));
      map.cells.emplace_back();
      map.notes.emplace_back();
      for (const int64_t length : lengths) {
        const auto cell = cells.find({label, depth, length});
        const bool known = cell != cells.end();
        map.cells.back().push_back(known ? std::optional(cell->second.first / double(cell->second.second))
                                         : std::nullopt);
        map.notes.back().push_back(known ? fmt::format("{:.0f}/{}", cell->second.first, cell->second.second) : "");
      }
    }
    out += heat_map(map);
  }
  return out;
}

std::string plot_tasks(const Summary& summary, int64_t length) {
  HeatMap map;
  map.title = fmt::format("score by task, {} tokens", tokens_text(length));
  std::vector<std::string> kvs;
  for (const SummaryRow& r : summary.rows) {
    if (r.length != length || r.lower_is_better) continue;
    add_new(map.columns, r.task);
    if (std::find(kvs.begin(), kvs.end(), r.kv) == kvs.end()) {
      kvs.push_back(r.kv);
      map.rows.push_back(r.label);
    }
  }
  if (map.columns.empty()) return {};
  const std::vector<std::string> tasks = map.columns;
  for (const std::string& kv : kvs) {
    map.cells.emplace_back();
    map.notes.emplace_back();
    for (const std::string& task : tasks) {
      const auto row = std::find_if(summary.rows.begin(), summary.rows.end(), [&](const SummaryRow& r) {
        return r.length == length && r.task == task && r.kv == kv;
      });
      const bool known = row != summary.rows.end() && row->score.n > 0;
      map.cells.back().push_back(known ? std::optional(row->score.mean) : std::nullopt);
      map.notes.back().push_back(known ? fmt::format("{:.0f}", 100 * row->score.mean) : "");
    }
  }
  // Names of tasks are wider than cells: numbers stand below, names in the title's place.
  std::string names;
  for (size_t i = 0; i < tasks.size(); ++i) {
    names += fmt::format("{}{} {}", i == 0 ? "" : ", ", i + 1, tasks[i]);
    map.columns[i] = std::to_string(i + 1);
  }
  return heat_map(map) + "<p>" + escape_html(names) + "</p>\n";
}

std::string plot_budgets(const Summary& summary, int64_t length) {
  std::vector<PlotSeries> series;
  std::map<std::string, std::vector<std::pair<int64_t, const TotalRow*>>> families;
  double full = -1;
  std::set<int64_t> budgets;
  for (const TotalRow& t : summary.totals) {
    if (t.length != length || t.tasks == 0) continue;
    if (t.label == "full") full = t.mean;
    const BudgetLabel b = split_budget(t.label);
    if (b.budget == 0) continue;
    families[b.family].emplace_back(b.budget, &t);
    budgets.insert(b.budget);
  }
  if (budgets.size() < 2) return {};
  for (auto& [family, rows] : families) {
    std::sort(rows.begin(), rows.end());
    PlotSeries s;
    s.name = family;
    for (const auto& [budget, t] : rows) {
      const Interval i{t->mean, t->mean, t->mean, t->n};
      s.points.emplace_back(double(budget), 100 * i.mean);
    }
    series.push_back(std::move(s));
  }
  if (full >= 0) {
    series.push_back({"full attention",
                      {{double(*budgets.begin()), 100 * full}, {double(*budgets.rbegin()), 100 * full}},
                      {},
                      true,
                      true,
                      false,
                      {}});
  }
  return line_plot(fmt::format("mean score against budget, {} tokens", tokens_text(length)),
                   {"rows per KV head and step", true, true, {}, {}}, {"mean score, %", false, false, 0, 100}, series);
}

std::string plot_bytes(const Summary& summary, int64_t length) {
  std::vector<std::pair<std::string, std::pair<double, double>>> points;
  for (const TotalRow& t : summary.totals) {
    if (t.length == length && t.tasks > 0 && !is_noise(t))
      points.push_back({t.label, {t.bytes_per_token / 1024, 100 * t.mean}});
  }
  if (points.empty()) return {};
  return trade_off(fmt::format("mean score against bytes read, {} tokens", tokens_text(length)),
                   {"KiB of K, V and summaries read for a token", true, false, {}, {}}, points, true);
}

std::string plot_speed(const Summary& summary, int64_t length) {
  std::vector<std::pair<std::string, std::pair<double, double>>> points;
  for (const TotalRow& t : summary.totals) {
    if (t.length == length && t.tasks > 0 && !is_noise(t))
      points.push_back({t.label, {t.tokens_per_second, 100 * t.mean}});
  }
  if (points.empty()) return {};
  return trade_off(fmt::format("mean score against decode speed, {} tokens", tokens_text(length)),
                   {"tokens/s", false, false, {}, {}}, points, false);
}

std::string plot_cost(const Summary& summary, CostPlot what) {
  std::map<std::string, std::map<int64_t, std::vector<double>>> values;
  std::set<int64_t> lengths;
  for (const SummaryRow& r : summary.rows) {
    if (r.score.n == 0 || r.length == 0 || r.kv.find('@') != std::string::npos) continue;
    // Recipes that share a reading have no time to the first token of their own.
    if (what == CostPlot::kFirstToken && r.shared_prefill && r.label != "full") continue;
    const double v = what == CostPlot::kDecode       ? r.tokens_per_second
                     : what == CostPlot::kFirstToken ? r.prefill_seconds
                                                     : (r.kept_bytes + r.index_bytes) / 1048576;
    values[r.label][r.length].push_back(v);
    lengths.insert(r.length);
  }
  if (lengths.size() < 2) return {};
  std::vector<PlotSeries> series;
  for (const std::string& label : report_labels(summary)) {
    if (!values.contains(label)) continue;
    PlotSeries s;
    s.name = label;
    for (const auto& [length, list] : values[label]) {
      double sum = 0;
      for (const double v : list) sum += v;
      s.points.emplace_back(double(length), sum / double(list.size()));
    }
    series.push_back(std::move(s));
  }
  const PlotAxis x{"tokens", true, true, {}, {}};
  if (what == CostPlot::kDecode)
    return line_plot("decode speed against depth", x, {"tokens/s", false, false, {}, {}}, series);
  if (what == CostPlot::kFirstToken) {
    return line_plot("reading the prompt against its length", x, {"seconds", true, false, {}, {}}, series);
  }
  return line_plot("KV memory against depth", x, {"MiB of rows and summaries", true, false, {}, {}}, series);
}

std::string plot_mass(const Summary& summary, int64_t length) {
  HeatMap map;
  map.title = fmt::format("captured mass of full attention by layer, {} tokens", tokens_text(length));
  map.x_title = "layer";
  std::map<std::string, std::pair<std::vector<double>, int64_t>> sums;
  size_t layers = 0;
  for (const SummaryRow& r : summary.rows) {
    if (r.length != length || r.layer_mass.empty()) continue;
    auto& [sum, n] = sums[r.label];
    sum.resize(std::max(sum.size(), r.layer_mass.size()));
    for (size_t l = 0; l < r.layer_mass.size(); ++l) sum[l] += r.layer_mass[l];
    ++n;
    layers = std::max(layers, sum.size());
  }
  if (sums.empty()) return {};
  for (size_t l = 0; l < layers; ++l) map.columns.push_back(std::to_string(l));
  for (const std::string& label : report_labels(summary)) {
    if (!sums.contains(label)) continue;
    map.rows.push_back(label);
    map.cells.emplace_back();
    map.notes.emplace_back();
    for (const double sum : sums[label].first) {
      const double mass = sum / double(sums[label].second);
      map.cells.back().push_back(mass);
      map.notes.back().push_back(fmt::format("{:.2f}", mass));
    }
    map.cells.back().resize(layers);
    map.notes.back().resize(layers);
  }
  return heat_map(map);
}

std::string plot_divergence(const Summary& summary, int64_t length) {
  std::vector<PlotSeries> series;
  for (const SummaryRow& r : summary.rows) {
    if (r.length != length || !r.lower_is_better || r.label == "full" || r.kv.find('@') != std::string::npos) continue;
    PlotSeries s;
    s.name = r.label;
    for (size_t b = 0; b < r.kl_buckets.size(); ++b) s.points.emplace_back(double(b + 1), r.kl_buckets[b]);
    series.push_back(std::move(s));
  }
  if (series.empty()) return {};
  return line_plot(fmt::format("divergence from full attention, text after {} tokens", tokens_text(length)),
                   {"quarter of the continuation", false, false, 1, 4}, {"KL, nats", true, false, {}, {}}, series);
}

}  // namespace longkv
