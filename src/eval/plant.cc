#include <algorithm>

#include "eval/tasks.h"

namespace longkv {

std::string plant(const std::vector<std::string>& units, const std::vector<Planted>& needles,
                  const std::string& separator) {
  std::vector<std::pair<int64_t, const std::string*>> places;
  for (const Planted& p : needles) {
    places.emplace_back(std::clamp(int64_t(double(units.size()) * p.depth / 100), int64_t(0), int64_t(units.size())),
                        &p.text);
  }
  std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string out;
  const auto add = [&](const std::string& text) {
    if (!out.empty()) out += separator;
    out += text;
  };
  size_t next = 0;
  for (size_t i = 0; i <= units.size(); ++i) {
    while (next < places.size() && places[next].first == int64_t(i)) add(*places[next++].second);
    if (i < units.size()) add(units[i]);
  }
  return out;
}

std::vector<std::string> noise_sentences(int64_t n) {
  static const char* const kNoise[] = {"The leaves are green.", "The snow is white.", "The night is dark.",
                                       "Off we go.", "And here we are once more."};
  std::vector<std::string> out;
  for (int64_t i = 0; i < n; ++i) out.emplace_back(kNoise[i % 5]);
  return out;
}

}  // namespace longkv
