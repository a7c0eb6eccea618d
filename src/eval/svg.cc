#include "eval/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace longkv {

namespace {

constexpr double kWidth = 560, kHeight = 330, kLeft = 66, kRight = 14, kTop = 30, kBottom = 46;
constexpr double kLegendLine = 15;
// Okabe and Ito's colours, told apart with any kind of sight, then darker ones of the same hues.
const char* const kColours[] = {"#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
                                "#8a7a00", "#004a75", "#8a3d00", "#00664a", "#84486a", "#935f00", "#2f7fae"};

std::string tick_text(double v, bool tokens) {
  if (tokens && v >= 1024)
    return std::fmod(v, 1024) == 0 ? fmt::format("{:.0f}K", v / 1024) : fmt::format("{:.1f}K", v / 1024);
  if (v != 0 && (std::abs(v) < 0.001 || std::abs(v) >= 1e7)) return fmt::format("{:.0e}", v);
  return std::abs(v) >= 1000 ? fmt::format("{:.0f}", v) : fmt::format("{:.4g}", v);
}

struct Scale {
  double low = 0, high = 1, from = 0, to = 1;
  bool logarithmic = false;
  std::vector<double> ticks;

  double at(double v) const {
    const double share = logarithmic ? (std::log(std::max(v, low)) - std::log(low)) / (std::log(high) - std::log(low))
                                     : (v - low) / (high - low);
    return from + std::clamp(share, -0.02, 1.02) * (to - from);
  }
};

Scale make_scale(const PlotAxis& axis, std::vector<double> values, double from, double to) {
  Scale s;
  s.from = from;
  s.to = to;
  std::erase_if(values, [&](double v) { return !std::isfinite(v) || (axis.logarithmic && v <= 0); });
  if (values.empty()) values = {1.0};
  s.logarithmic = axis.logarithmic;
  s.low = axis.low.value_or(*std::min_element(values.begin(), values.end()));
  s.high = axis.high.value_or(*std::max_element(values.begin(), values.end()));
  if (s.logarithmic) {
    if (!axis.low) s.low /= 1.15;
    if (!axis.high) s.high *= 1.15;
    if (s.high <= s.low) s.high = 2 * s.low;
    const double base = axis.tokens ? 2 : 10;
    const int first = int(std::floor(std::log(s.low) / std::log(base))),
              last = int(std::ceil(std::log(s.high) / std::log(base)));
    // Within two powers of ten, twos and fives too.
    const bool fine = !axis.tokens && last - first <= 3;
    const int every = std::max(1, (last - first + 7) / 8);
    for (int e = first; e <= last; e += every) {
      for (const double m : {1.0, 2.0, 5.0}) {
        const double tick = m * std::pow(base, e);
        if ((m == 1 || fine) && tick >= s.low && tick <= s.high) s.ticks.push_back(tick);
      }
    }
    return s;
  }
  if (!axis.low) s.low = std::min(0.0, s.low);
  if (s.high <= s.low) s.high = s.low + 1;
  // Steps of 1, 2 or 5 times a power of ten, about five of them.
  const double raw = (s.high - s.low) / 5, power = std::pow(10, std::floor(std::log10(raw)));
  const double step = raw / power > 5 ? 10 * power : raw / power > 2 ? 5 * power : raw / power > 1 ? 2 * power : power;
  if (!axis.high) s.high = std::ceil(s.high / step - 1e-9) * step;
  for (double t = std::ceil(s.low / step - 1e-9) * step; t <= s.high + step * 1e-6; t += step) {
    s.ticks.push_back(std::abs(t) < step * 1e-9 ? 0 : t);
  }
  return s;
}

std::string text(double x, double y, const std::string& anchor, const std::string& content, int size = 11,
                 const std::string& more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" font-size=\"{}\"{}>{}</text>\n", x, y, anchor,
                     size, more, escape_html(content));
}

// Red over yellow to green.
std::string heat_colour(double v) {
  v = std::clamp(v, 0.0, 1.0);
  const double low[3] = {214, 69, 65}, mid[3] = {245, 215, 110}, high[3] = {63, 160, 90};
  int c[3];
  for (int i = 0; i < 3; ++i) {
    c[i] = int(v < 0.5 ? low[i] + (mid[i] - low[i]) * 2 * v : mid[i] + (high[i] - mid[i]) * (2 * v - 1));
  }
  return fmt::format("#{:02x}{:02x}{:02x}", c[0], c[1], c[2]);
}

}  // namespace

std::string escape_html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
    }
  }
  return out;
}

std::string line_plot(const std::string& title, const PlotAxis& x, const PlotAxis& y,
                      const std::vector<PlotSeries>& series) {
  std::vector<double> xs, ys;
  for (const PlotSeries& s : series) {
    for (const auto& [px, py] : s.points) xs.push_back(px), ys.push_back(py);
    for (const auto& [low, high] : s.bars) ys.push_back(low), ys.push_back(high);
  }
  // The legend stands below, in two columns.
  const double legend = kLegendLine * double((series.size() + 1) / 2) + 8;
  const Scale sx = make_scale(x, xs, kLeft, kWidth - kRight), sy = make_scale(y, ys, kHeight - kBottom, kTop);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"sans-serif\" role=\"img\">\n<title>{2}</title>\n",
      kWidth, kHeight + legend, escape_html(title));
  out += text(kWidth / 2, 18, "middle", title, 14, " font-weight=\"bold\"");
  for (const double t : sy.ticks) {
    out += fmt::format("<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>\n", kLeft,
                       kWidth - kRight, sy.at(t), sy.at(t));
    out += text(kLeft - 6, sy.at(t) + 4, "end", tick_text(t, y.tokens));
  }
  for (const double t : sx.ticks) {
    out += fmt::format("<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"#eee\"/>\n",
                       sx.at(t), kTop, kHeight - kBottom);
    out += text(sx.at(t), kHeight - kBottom + 16, "middle", tick_text(t, x.tokens));
  }
  out += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#888\"/>\n", kLeft,
                     kTop, kWidth - kRight - kLeft, kHeight - kBottom - kTop);
  out += text((kLeft + kWidth - kRight) / 2, kHeight - 12, "middle", x.title, 12);
  out += text(0, 0, "middle", y.title, 12,
              fmt::format(" transform=\"translate(14 {:.0f}) rotate(-90)\"", (kTop + kHeight - kBottom) / 2));
  for (size_t i = 0; i < series.size(); ++i) {
    const PlotSeries& s = series[i];
    const char* colour = kColours[i % std::size(kColours)];
    if (s.line && s.points.size() > 1) {
      std::string path;
      for (const auto& [px, py] : s.points) path += fmt::format("{:.1f},{:.1f} ", sx.at(px), sy.at(py));
      out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{}/>\n", path, colour,
                         s.dashed ? " stroke-dasharray=\"6 4\"" : "");
    }
    for (size_t k = 0; s.marks && k < s.points.size(); ++k) {
      const double px = sx.at(s.points[k].first), py = sy.at(s.points[k].second);
      if (k < s.bars.size()) {
        out += fmt::format(
            "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\" opacity=\"0.5\"/>\n", px,
            sy.at(s.bars[k].first), sy.at(s.bars[k].second), colour);
      }
      out += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>{}: {} / {}</title></circle>\n", px, py,
          colour, escape_html(s.name), tick_text(s.points[k].first, x.tokens), tick_text(s.points[k].second, y.tokens));
      if (k == 0 && !s.label.empty()) {
        const bool left = px > kWidth * 0.75;
        out += text(px + (left ? -6 : 6), py - 5, left ? "end" : "start", s.label, 10);
      }
    }
    const double lx = i % 2 == 0 ? kLeft : kWidth / 2 + 20, ly = kHeight + kLegendLine * double(i / 2) + 4;
    out += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"4\" fill=\"{}\"/>\n", lx, ly - 4, colour);
    out += text(lx + 20, ly + 1, "start", s.name.size() > 40 ? s.name.substr(0, 37) + "..." : s.name);
  }
  return out + "</svg>\n";
}

std::string heat_map(const HeatMap& map) {
  const double cell_w = map.columns.size() > 12 ? 36 : 56, cell_h = map.rows.size() > 16 ? 14 : 22;
  size_t longest = 0;
  for (const std::string& r : map.rows) longest = std::max(longest, r.size());
  const double left = 40 + 6.5 * double(longest), top = 30;
  const double width = std::max(left + cell_w * double(map.columns.size()) + 12, 8.2 * double(map.title.size()) + 24);
  const double height = top + cell_h * double(map.rows.size()) + 38;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"sans-serif\" role=\"img\">\n<title>{2}</title>\n",
      width, height, escape_html(map.title));
  out += text(8, 18, "start", map.title, 13, " font-weight=\"bold\"");
  for (size_t r = 0; r < map.rows.size(); ++r) {
    const double y = top + cell_h * double(r);
    out += text(left - 6, y + cell_h / 2 + 4, "end", map.rows[r]);
    for (size_t c = 0; c < map.columns.size(); ++c) {
      const auto& value = map.cells[r][c];
      const double x = left + cell_w * double(c);
      const std::string note = r < map.notes.size() && c < map.notes[r].size() ? map.notes[r][c] : "";
      out += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\" stroke=\"#fff\">"
          "<title>{}</title></rect>\n",
          x, y, cell_w, cell_h, value ? heat_colour(*value) : "#ddd",
          value ? fmt::format("{:.3f}", *value) : "not measured");
      if (!note.empty()) out += text(x + cell_w / 2, y + cell_h / 2 + 4, "middle", note, 10);
    }
  }
  for (size_t c = 0; c < map.columns.size(); ++c) {
    out +=
        text(left + cell_w * (double(c) + 0.5), top + cell_h * double(map.rows.size()) + 15, "middle", map.columns[c]);
  }
  out += text(left + cell_w * double(map.columns.size()) / 2, height - 6, "middle", map.x_title, 11);
  if (map.rows.size() > 2) {
    out += text(
        0, 0, "middle", map.y_title, 11,
        fmt::format(" transform=\"translate(12 {:.0f}) rotate(-90)\"", top + cell_h * double(map.rows.size()) / 2));
  }
  return out + "</svg>\n";
}

std::string heat_legend() {
  std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"330\" height=\"24\" font-family=\"sans-serif\">";
  for (int i = 0; i <= 20; ++i) {
    out += fmt::format("<rect x=\"{}\" y=\"4\" width=\"10\" height=\"14\" fill=\"{}\"/>", 30 + 10 * i,
                       heat_colour(i / 20.0));
  }
  return out + text(24, 15, "end", "0") + text(246, 15, "start", "100% right") + "</svg>\n";
}

}  // namespace longkv
