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

// Whether the row is of that length and its mean over all the tasks that full attention was asked: means of fewer tasks
// stand in the tables, with their tasks, but beside the others they would mislead.
bool comparable(const Summary& summary, const TotalRow& row, int64_t length) {
  const auto full = std::find_if(summary.totals.begin(), summary.totals.end(),
                                 [&](const TotalRow& t) { return t.length == length && t.label == "full"; });
  return row.length == length && row.tasks > 0 && (full == summary.totals.end() || row.tasks == full->tasks);
}

// Recipes against a cost, of which less (or more) is better, with the line of those that none beats in both.
std::string trade_off(const std::string& title, const PlotAxis& x,
                      const std::vector<std::pair<std::string, std::pair<double, double>>>& points,
                      bool less_is_better) {
  std::vector<PlotSeries> series;
  for (const auto& [name, point] : points) series.push_back({name, {point}, {}, false, false, true, name, false});
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

std::vector<std::string> plot_needles(std::span<const EvalRecord> records, const Summary& summary) {
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
  std::vector<std::string> out;
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
    out.push_back(heat_map(map));
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
  // Many names do not fit below their columns: numbers stand there.
  if (tasks.size() > 8) {
    for (size_t i = 0; i < tasks.size(); ++i) {
      map.x_title += fmt::format("{}{} {}", i == 0 ? "" : ", ", i + 1, tasks[i]);
      map.columns[i] = std::to_string(i + 1);
    }
  }
  return heat_map(map);
}

std::string plot_budgets(const Summary& summary, int64_t length, const std::string& task) {
  struct Point {
    int64_t budget;
    double mean, low, high;
  };
  std::map<std::string, std::vector<Point>> families;
  std::vector<std::string> order;
  std::optional<Point> full;
  std::set<int64_t> budgets;
  const auto add = [&](const std::string& label, double mean, double low, double high) {
    if (label == "full") full = Point{0, 100 * mean, 100 * low, 100 * high};
    const BudgetLabel b = split_budget(label);
    if (b.budget == 0) return;
    add_new(order, b.family);
    families[b.family].push_back({b.budget, 100 * mean, 100 * low, 100 * high});
    budgets.insert(b.budget);
  };
  if (task.empty()) {
    for (const TotalRow& t : summary.totals) {
      if (comparable(summary, t, length)) add(t.label, t.mean, t.low, t.high);
    }
  } else {
    for (const SummaryRow& r : summary.rows) {
      if (r.length == length && r.task == task && !r.lower_is_better && r.score.n > 0) {
        add(r.label, r.score.mean, r.score.low, r.score.high);
      }
    }
  }
  if (budgets.size() < 2) return {};
  std::vector<PlotSeries> series;
  for (const std::string& family : order) {
    auto& points = families[family];
    std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.budget < b.budget; });
    PlotSeries s;
    s.name = family;
    // The ceiling of every choice of so many rows.
    s.strong = family == "oracle";
    for (const Point& p : points) {
      s.points.emplace_back(double(p.budget), p.mean);
      s.bars.emplace_back(p.low, p.high);
    }
    series.push_back(std::move(s));
  }
  if (full) {
    PlotSeries s;
    s.name = "full attention";
    s.points = {{double(*budgets.begin()), full->mean}, {double(*budgets.rbegin()), full->mean}};
    s.dashed = s.strong = true;
    s.marks = false;
    series.push_back(std::move(s));
  }
  return line_plot(fmt::format("{} against budget, {} tokens", task.empty() ? "mean score" : task, tokens_text(length)),
                   {"rows per KV head and step", true, true, {}, {}}, {"score, %", false, false, 0, 100}, series,
                   PlotNames::kAtEnd);
}

std::string plot_bytes(const Summary& summary, int64_t length) {
  std::vector<std::pair<std::string, std::pair<double, double>>> points;
  for (const TotalRow& t : summary.totals) {
    if (comparable(summary, t, length) && !is_noise(t))
      points.push_back({t.label, {t.bytes_per_token / 1024, 100 * t.mean}});
  }
  if (points.empty()) return {};
  return trade_off(fmt::format("mean score against bytes read, {} tokens", tokens_text(length)),
                   {"KiB of K, V and summaries read for a token", true, false, {}, {}}, points, true);
}

std::string plot_speed(const Summary& summary, int64_t length) {
  std::vector<std::pair<std::string, std::pair<double, double>>> points;
  for (const TotalRow& t : summary.totals) {
    if (comparable(summary, t, length) && !is_noise(t))
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
  const PlotNames names = PlotNames::kAtEnd;
  if (what == CostPlot::kDecode)
    return line_plot("decode speed against depth", x, {"tokens/s", true, false, {}, {}}, series, names);
  if (what == CostPlot::kFirstToken) {
    return line_plot("reading the prompt against its length", x, {"seconds", true, false, {}, {}}, series, names);
  }
  return line_plot("KV memory against depth", x, {"MiB of rows and summaries", true, false, {}, {}}, series, names);
}

std::string plot_mass(const Summary& summary, int64_t length) {
  struct Sum {
    std::vector<double> layers, heads;
    int64_t n = 0;
  };
  std::map<std::string, Sum> sums;
  size_t layers = 0, heads = 0;
  const auto add = [](std::vector<double>& sum, const std::vector<double>& mass) {
    sum.resize(std::max(sum.size(), mass.size()));
    for (size_t i = 0; i < mass.size(); ++i) sum[i] += mass[i];
  };
  for (const SummaryRow& r : summary.rows) {
    if (r.length != length || r.layer_mass.empty()) continue;
    Sum& sum = sums[r.label];
    add(sum.layers, r.layer_mass);
    add(sum.heads, r.head_mass);
    ++sum.n;
    layers = std::max(layers, sum.layers.size());
    heads = std::max(heads, sum.heads.size());
  }
  if (layers == 0) return {};
  const size_t per_layer = heads / layers;
  HeatMap map;
  map.title = fmt::format("captured mass of full attention, {} tokens", tokens_text(length));
  map.x_title = per_layer > 1 ? "layer.KV head" : "layer";
  const size_t columns = per_layer > 1 ? heads : layers;
  for (size_t c = 0; c < columns; ++c) {
    // Where columns are narrow every layer's first one is named.
    const bool first = per_layer <= 1 || c % per_layer == 0;
    map.columns.push_back(per_layer <= 1  ? std::to_string(c)
                          : columns <= 24 ? fmt::format("{}.{}", c / per_layer, c % per_layer)
                          : first         ? std::to_string(c / per_layer)
                                          : "");
  }
  for (const std::string& label : report_labels(summary)) {
    const auto found = sums.find(label);
    if (found == sums.end()) continue;
    const std::vector<double>& sum = per_layer > 1 ? found->second.heads : found->second.layers;
    map.rows.push_back(label);
    map.cells.emplace_back(columns);
    map.notes.emplace_back(columns);
    for (size_t c = 0; c < sum.size(); ++c) {
      const double mass = sum[c] / double(found->second.n);
      map.cells.back()[c] = mass;
      if (columns <= 24) map.notes.back()[c] = fmt::format("{:.2f}", mass);
    }
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
