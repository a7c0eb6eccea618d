#include "eval/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

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
  const double first = std::ceil(s.low / step - 1e-9), last = std::floor(s.high / step + 1e-6);
  for (int i = 0; i <= int(last - first); ++i) s.ticks.push_back((first + i) * step);
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

namespace {

// A text's place, so that the next one avoids it.
struct Box {
  double left, top, right, bottom;
  bool meets(const Box& o) const { return left < o.right && o.left < right && top < o.bottom && o.top < bottom; }
};

// Names of points, each in the nearest free place around its point; where none is free the point's tooltip must do.
class Labels {
 public:
  void keep_free(double x, double y) { taken_.push_back({x - 4, y - 4, x + 4, y + 4}); }

  std::string place(double x, double y, const std::string& name, const char* colour) {
    const double width = 5.4 * double(name.size());
    for (const double away : {0.0, 12.0, 24.0, 38.0}) {
      for (const auto& [dx, dy] : {std::pair(1, -1), {1, 1}, {-1, -1}, {-1, 1}, {1, 0}, {-1, 0}}) {
        const double tx = x + dx * (6 + away / 2), ty = y + 4 + dy * (6 + away);
        const Box box{dx > 0 ? tx : tx - width, ty - 9, dx > 0 ? tx + width : tx, ty + 2};
        if (box.left < kLeft || box.right > kWidth || box.top < kTop || box.bottom > kHeight - kBottom) continue;
        if (std::any_of(taken_.begin(), taken_.end(), [&](const Box& b) { return b.meets(box); })) continue;
        taken_.push_back(box);
        std::string out;
        if (away > 0) {
          out = fmt::format(
              "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"0.6\"/>\n", x,
              y, tx, ty - 3, colour);
        }
        return out + text(tx, ty, dx > 0 ? "start" : "end", name, 10);
      }
    }
    return {};
  }

 private:
  std::vector<Box> taken_;
};

// Heights of names at the lines' ends, pushed apart until none covers another.
std::vector<double> spread(std::vector<double> wanted, double step, double low, double high) {
  std::vector<size_t> order(wanted.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return wanted[a] < wanted[b]; });
  double last = low - step;
  for (const size_t i : order) last = wanted[i] = std::max(wanted[i], last + step);
  // What was pushed out at the bottom goes back up.
  double next = std::max(high, low + step * double(wanted.size())) + step;
  for (size_t k = order.size(); k-- > 0;) next = wanted[order[k]] = std::min(wanted[order[k]], next - step);
  return wanted;
}

// Two variants of a recipe often differ in their last word.
std::string cut_name(const std::string& name) { return name.size() > 64 ? name.substr(0, 61) + "..." : name; }

}  // namespace

std::string line_plot(const std::string& title, const PlotAxis& x, const PlotAxis& y,
                      const std::vector<PlotSeries>& series, PlotNames names) {
  std::vector<double> xs, ys;
  for (const PlotSeries& s : series) {
    for (const auto& [px, py] : s.points) xs.push_back(px), ys.push_back(py);
    for (const auto& [low, high] : s.bars) ys.push_back(low), ys.push_back(high);
  }
  const bool at_end = names == PlotNames::kAtEnd;
  // Below the plot names stand in two columns; points that carry their own need none.
  std::vector<size_t> listed;
  for (size_t i = 0; i < series.size(); ++i) {
    if (!at_end && series[i].label.empty()) listed.push_back(i);
  }
  const double legend = listed.empty() ? 0 : kLegendLine * std::ceil(double(listed.size()) / 2) + 8;
  // As many names at the ends as there is height for.
  const double body = std::max(kHeight, kTop + kBottom + (at_end ? 12.5 * double(series.size()) : 0.0));
  double names_width = 0;
  for (const PlotSeries& s : series) names_width = std::max(names_width, 16 + 6.8 * double(cut_name(s.name).size()));
  const double width = kWidth + (at_end ? names_width : 0), bottom = body - kBottom;
  const Scale sx = make_scale(x, xs, kLeft, kWidth - kRight), sy = make_scale(y, ys, bottom, kTop);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"sans-serif\" role=\"img\">\n<title>{2}</title>\n<rect width=\"100%\" height=\"100%\" "
      "fill=\"#fff\"/>\n",
      width, body + legend, escape_html(title));
  out += text(kWidth / 2, 18, "middle", title, 14, " font-weight=\"bold\"");
  for (const double t : sy.ticks) {
    out += fmt::format("<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>\n", kLeft,
                       kWidth - kRight, sy.at(t), sy.at(t));
    out += text(kLeft - 6, sy.at(t) + 4, "end", tick_text(t, y.tokens));
  }
  for (const double t : sx.ticks) {
    out += fmt::format("<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"#eee\"/>\n",
                       sx.at(t), kTop, bottom);
    out += text(sx.at(t), bottom + 16, "middle", tick_text(t, x.tokens));
  }
  out += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#888\"/>\n", kLeft,
                     kTop, kWidth - kRight - kLeft, bottom - kTop);
  out += text((kLeft + kWidth - kRight) / 2, body - 12, "middle", x.title, 12);
  out += text(0, 0, "middle", y.title, 12,
              fmt::format(" transform=\"translate(14 {:.0f}) rotate(-90)\"", (kTop + bottom) / 2));
  std::vector<double> ends;
  for (const PlotSeries& s : series) ends.push_back(s.points.empty() ? bottom : sy.at(s.points.back().second));
  ends = spread(ends, 12.5, kTop + 4, bottom);
  Labels labels;
  for (const PlotSeries& s : series) {
    for (const auto& [px, py] : s.points) {
      if (s.marks) labels.keep_free(sx.at(px), sy.at(py));
    }
  }
  size_t plain = 0;  // series that take a colour
  for (size_t i = 0; i < series.size(); ++i) {
    const PlotSeries& s = series[i];
    const size_t turn = s.strong ? 0 : plain++ / (std::size(kColours) - 1);
    const char* colour = s.strong ? kColours[0] : kColours[1 + (plain - 1) % (std::size(kColours) - 1)];
    const char* dashes = s.dashed ? " stroke-dasharray=\"6 4\"" : turn % 2 == 1 ? " stroke-dasharray=\"2 2\"" : "";
    if (s.line && s.points.size() > 1) {
      std::string path;
      for (const auto& [px, py] : s.points) path += fmt::format("{:.1f},{:.1f} ", sx.at(px), sy.at(py));
      out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\"{}/>\n", path, colour,
                         s.strong ? 3 : 1.6, dashes);
    }
    for (size_t k = 0; s.marks && k < s.points.size(); ++k) {
      const double px = sx.at(s.points[k].first), py = sy.at(s.points[k].second);
      if (k < s.bars.size()) {
        out += fmt::format(
            "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\" opacity=\"0.4\"/>\n", px,
            sy.at(s.bars[k].first), sy.at(s.bars[k].second), colour);
      }
      out += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>{}: {} / {}</title></circle>\n", px, py,
          colour, escape_html(s.name), tick_text(s.points[k].first, x.tokens), tick_text(s.points[k].second, y.tokens));
      if (k == 0 && !s.label.empty()) out += labels.place(px, py, s.label, colour);
    }
    const std::string name = cut_name(s.name);
    if (at_end && !s.points.empty()) {
      const double px = sx.at(s.points.back().first), py = sy.at(s.points.back().second);
      out += fmt::format(
          "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"0.7\"/>\n", px,
          py, kWidth + 6, ends[i], colour);
      out += text(kWidth + 10, ends[i] + 4, "start", name, 11,
                  fmt::format(" fill=\"{}\"{}", colour, s.strong ? " font-weight=\"bold\"" : ""));
    }
    if (const auto at = std::find(listed.begin(), listed.end(), i); at != listed.end()) {
      const auto place = size_t(at - listed.begin());
      const double lx = place % 2 == 0 ? kLeft : kWidth / 2 + 20,
                   ly = body + kLegendLine * std::floor(double(place) / 2) + 4;
      out += fmt::format(
          "<line x1=\"{0:.1f}\" y1=\"{2:.1f}\" x2=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\" "
          "stroke-width=\"4\"{4}/>\n",
          lx, lx + 16, ly - 2, colour, dashes);
      out += text(lx + 20, ly + 1, "start", name);
    }
  }
  return out + "</svg>\n";
}

std::string heat_map(const HeatMap& map) {
  // Wide enough for the notes; without any, a page holds some hundred columns.
  const bool noted = std::any_of(map.notes.begin(), map.notes.end(), [](const auto& row) {
    return std::any_of(row.begin(), row.end(), [](const std::string& note) { return !note.empty(); });
  });
  size_t widest = 0;
  for (const std::string& c : map.columns) widest = std::max(widest, c.size());
  const double cell_w = map.columns.size() <= 12 ? std::max(56.0, 6.6 * double(widest))
                        : noted                  ? 36
                                                 : std::clamp(900.0 / double(map.columns.size()), 7.0, 36.0);
  const double cell_h = map.rows.size() > 16 ? 14 : 22;
  size_t longest = 0;
  for (const std::string& r : map.rows) longest = std::max(longest, r.size());
  const double left = 40 + 6.5 * double(longest), top = 30;
  const double width = std::max({left + cell_w * double(map.columns.size()) + 12, 8.2 * double(map.title.size()) + 24,
                                 6.0 * double(map.x_title.size()) + 24});
  const double height = top + cell_h * double(map.rows.size()) + 38;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"sans-serif\" role=\"img\">\n<title>{2}</title>\n<rect width=\"100%\" height=\"100%\" "
      "fill=\"#fff\"/>\n",
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
