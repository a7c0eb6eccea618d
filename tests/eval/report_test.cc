// What the page and its plots say, read from their text.
#include "eval/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <regex>

#include "eval/report_plots.h"
#include "eval/svg.h"

namespace longkv {
namespace {

EvalRecord record(const std::string& task, int64_t index, const std::string& kv, double score) {
  EvalRecord r;
  r.suite = "longkv";
  r.task = task;
  r.length = 8192;
  r.depth = 50;
  r.index = index;
  r.kv = r.label = kv;
  r.question = "hidden";
  r.metric = "all_substrings";
  r.sparse = kv == "full" ? "none" : "question, answer";
  r.score = score;
  r.references = {"7"};
  r.read_on = "Card";
  r.jobs = 4;
  r.checked = 1;
  r.layer_mass = {0.5, 0.75};
  r.head_mass = {0.25, 0.75, 0.5, 1};
  return r;
}

std::vector<EvalRecord> records() {
  std::vector<EvalRecord> list;
  for (int64_t i = 0; i < 20; ++i) {
    for (const char* task : {"niah", "vt"}) {
      list.push_back(record(task, i, "full", 1));
      list.push_back(record(task, i, "oracle:budget=512", i % 2));
      list.push_back(record(task, i, "oracle:budget=1K", 1));
      list.push_back(record(task, i, "quest:budget=512", 0));
      list.push_back(record(task, i, "quest:budget=1024", i % 4 == 0));
    }
  }
  return list;
}

// Two tasks with the same interval: the half-widths of their mean are those of a task over the root of two.
TEST(EvalReport, TheMeanOverTasksHasAnInterval) {
  const Summary s = summarise(records());
  for (const TotalRow& t : s.totals) {
    const auto row = std::find_if(s.rows.begin(), s.rows.end(), [&](const SummaryRow& r) { return r.kv == t.kv; });
    EXPECT_DOUBLE_EQ(t.mean, row->score.mean);
    EXPECT_NEAR(t.mean - t.low, (row->score.mean - row->score.low) / std::sqrt(2.0), 1e-12) << t.kv;
    EXPECT_NEAR(t.high - t.mean, (row->score.high - row->score.mean) / std::sqrt(2.0), 1e-12) << t.kv;
  }
}

TEST(EvalReport, BudgetsAreLinesAndTheOracleIsTheStrongOne) {
  const Summary s = summarise(records());
  for (const char* task : {"", "vt"}) {
    const std::string svg = plot_budgets(s, 8192, task);
    // oracle and quest, and full attention's dashed line.
    const std::regex line("<polyline [^>]*stroke-width=\"([0-9.]+)\"");
    std::vector<std::string> widths;
    for (std::sregex_iterator i(svg.begin(), svg.end(), line), end; i != end; ++i) widths.push_back((*i)[1]);
    EXPECT_EQ(widths, (std::vector<std::string>{"3", "1.6", "3"})) << svg;
    for (const char* name : {">oracle<", ">quest<", ">full attention<"}) EXPECT_NE(svg.find(name), std::string::npos);
  }
  EXPECT_EQ(plot_budgets(s, 4096, ""), "");
}

// A recipe that was asked one of two tasks has a mean that says nothing beside the others: only that task's plot has
// it.
TEST(EvalReport, MeansOfFewerTasksAreNotDrawn) {
  auto list = records();
  for (const char* label : {"half:budget=512", "half:budget=1024"}) list.push_back(record("vt", 0, label, 1));
  const Summary s = summarise(list);
  EXPECT_NE(plot_budgets(s, 8192, "vt").find(">half<"), std::string::npos);
  EXPECT_EQ(plot_budgets(s, 8192, "").find(">half<"), std::string::npos);
  for (const ReportPlot& p : report_plots(list, s)) {
    if (p.name.starts_with("bytes")) {
      EXPECT_EQ(p.svg.find("half"), std::string::npos);
    }
  }
}

TEST(EvalReport, NamesAtTheEndsNeverCoverEachOther) {
  std::vector<PlotSeries> series;
  for (int i = 0; i < 30; ++i) {
    PlotSeries line;
    line.name = "recipe" + std::to_string(i);
    line.points = {{1, 50}, {2, 90 + 0.1 * i}};
    series.push_back(line);
  }
  const std::string svg =
      line_plot("t", {"x", false, false, {}, {}}, {"y", false, false, 0, 100}, series, PlotNames::kAtEnd);
  const std::regex name("<text x=\"570.0\" y=\"([0-9.]+)\"");
  std::vector<double> heights;
  for (std::sregex_iterator i(svg.begin(), svg.end(), name), end; i != end; ++i) heights.push_back(std::stod((*i)[1]));
  ASSERT_EQ(heights.size(), 30u);
  std::sort(heights.begin(), heights.end());
  for (size_t i = 1; i < heights.size(); ++i) EXPECT_GE(heights[i] - heights[i - 1], 11);
  std::smatch size;
  ASSERT_TRUE(std::regex_search(svg, size, std::regex("height=\"([0-9]+)\"")));
  EXPECT_LE(heights.back(), std::stod(size[1]));
}

// At 0.6 of the font's size a letter, which the widest of the usual fonts take.
TEST(EvalReport, LongNamesAtTheEndsFitThePicture) {
  for (const size_t letters : {4, 40, 60, 90}) {
    PlotSeries line;
    line.name = std::string(letters, 'x');
    line.points = {{1, 50}, {2, 90}};
    const std::string svg =
        line_plot("t", {"x", false, false, {}, {}}, {"y", false, false, 0, 100}, {line}, PlotNames::kAtEnd);
    std::smatch size, name;
    ASSERT_TRUE(std::regex_search(svg, size, std::regex("width=\"([0-9]+)\"")));
    ASSERT_TRUE(std::regex_search(svg, name, std::regex("<text x=\"([0-9.]+)\"[^>]*>(x{4,}[.]*)<")));
    EXPECT_LE(std::stod(name[1]) + 0.6 * 11 * double(name[2].length()), std::stod(size[1])) << letters;
    EXPECT_EQ(size_t(name[2].length()), std::min<size_t>(letters, 64));
  }
}

TEST(EvalReport, MassesStandByLayerAndHead) {
  const std::string svg = plot_mass(summarise(records()), 8192);
  for (const char* column : {">0.0<", ">0.1<", ">1.0<", ">1.1<"}) EXPECT_NE(svg.find(column), std::string::npos);
  for (const char* mass : {">0.25<", ">0.75<", ">0.50<", ">1.00<"}) EXPECT_NE(svg.find(mass), std::string::npos);
}

TEST(EvalReport, ReaderAndJobsAreNamed) {
  const auto list = records();
  const Summary s = summarise(list);
  const std::string page = report_html({{"model", "m"}, {"question", "hidden"}}, list, s);
  for (const std::string& text : {page, summary_text(s)}) {
    EXPECT_NE(text.find("Prompts were read on Card"), std::string::npos);
    EXPECT_NE(text.find("4 prompts at once"), std::string::npos);
  }
  std::vector<std::string> names;
  for (const ReportPlot& p : report_plots(list, s)) names.push_back(p.name);
  for (const char* name : {"tasks-8K", "budget-8K", "budget-8K-vt", "bytes-8K", "speed-8K", "mass-8K"}) {
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
  }
  for (const ReportPlot& p : report_plots(list, s)) {
    EXPECT_TRUE(p.svg.starts_with("<svg ") && p.svg.ends_with("</svg>\n")) << p.name;
  }
}

}  // namespace
}  // namespace longkv
