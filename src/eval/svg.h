// Plots as SVG text: no script, no font and no picture from elsewhere.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace longkv {

std::string escape_html(const std::string& text);

struct PlotAxis {
  std::string title;
  bool logarithmic = false;
  bool tokens = false;              // ticks as 8K, 128K
  std::optional<double> low, high;  // fixed ends, so that panels can be compared
};

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // in the order in which the line joins them
  std::vector<std::pair<double, double>> bars;    // intervals, one a point; may be empty
  bool line = true, dashed = false, marks = true;
  std::string label;    // written beside the first point, where there is room
  bool strong = false;  // black and thick: what the others are measured by
};

// Where names stand: below the plot, or at the right end of each line.
enum class PlotNames { kBelow, kAtEnd };

std::string line_plot(const std::string& title, const PlotAxis& x, const PlotAxis& y,
                      const std::vector<PlotSeries>& series, PlotNames names = PlotNames::kBelow);

// Cells of 0 to 1 in one fixed colour scale, red over yellow to green; rows from above. An absent value is grey.
struct HeatMap {
  std::string title, x_title, y_title;
  std::vector<std::string> columns, rows;
  std::vector<std::vector<std::optional<double>>> cells;  // [row][column]
  std::vector<std::vector<std::string>> notes;            // text of a cell; may be empty
};
std::string heat_map(const HeatMap& map);
std::string heat_legend();

}  // namespace longkv
