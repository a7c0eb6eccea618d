#include "support/golden.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "support/paths.h"

namespace longkv::test {

namespace {

std::vector<float> read_floats(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot open " + path);
  const auto bytes = std::filesystem::file_size(path);
  std::vector<float> values(bytes / sizeof(float));
  in.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
  if (!in || bytes % sizeof(float) != 0) throw std::runtime_error("cannot read whole floats from " + path);
  return values;
}

}  // namespace

const GoldenCase& Golden::find(const std::string& case_name) const {
  for (const GoldenCase& c : cases) {
    if (c.name == case_name) return c;
  }
  throw std::runtime_error(name + " has no case " + case_name);
}

Golden load_golden(const std::string& name) {
  const std::string stem = golden("models/" + name);
  std::ifstream in(stem + ".json");
  if (!in) throw std::runtime_error("cannot open " + stem + ".json");
  const nlohmann::json json = nlohmann::json::parse(in);
  Golden out;
  out.name = name;
  out.model = json.at("model");
  out.family = json.value("family", "");
  out.vocab = json.at("vocab");
  out.columns = json.at("columns").get<std::vector<int32_t>>();
  const std::vector<float> values = read_floats(stem + ".bin");
  const size_t width = out.columns.empty() ? static_cast<size_t>(out.vocab) : out.columns.size();
  size_t at = 0;
  for (const auto& j : json.at("cases")) {
    GoldenCase c;
    c.name = j.at("name");
    j.at("ids").get_to(c.ids);
    j.at("positions").get_to(c.positions);
    j.at("norms").get_to(c.norms);
    j.at("lse").get_to(c.lse);
    j.at("top").get_to(c.top);
    j.at("gap").get_to(c.gap);
    for (size_t i = 0; i < c.positions.size(); ++i, at += width) {
      if (at + width > values.size()) throw std::runtime_error(stem + ".bin is shorter than its description");
      c.logits.emplace_back(values.begin() + static_cast<std::ptrdiff_t>(at),
                            values.begin() + static_cast<std::ptrdiff_t>(at + width));
    }
    out.cases.push_back(std::move(c));
  }
  if (at != values.size()) throw std::runtime_error(stem + ".bin is longer than its description");
  if (json.contains("greedy")) {
    for (const auto& j : json.at("greedy")) {
      out.greedy.push_back({j.at("prompt"), j.at("continuation"), j.at("gap")});
    }
  }
  return out;
}

std::vector<std::string> tiny_goldens() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(golden("models"))) {
    if (entry.path().extension() == ".gguf") names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string tiny_model(const std::string& name) { return golden("models/" + name + ".gguf"); }

double relative_error(const Golden& golden, const GoldenCase& recorded, size_t row, std::span<const float> found) {
  if (found.size() != static_cast<size_t>(golden.vocab)) throw std::runtime_error("a row must have `vocab` logits");
  const std::vector<float>& want = recorded.logits.at(row);
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const float got = found[golden.columns.empty() ? i : static_cast<size_t>(golden.columns[i])];
    difference += (static_cast<double>(got) - want[i]) * (static_cast<double>(got) - want[i]);
    norm += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(difference / norm);
}

Parting first_parting(const GoldenGreedy& recorded, std::span<const int32_t> found, float limit) {
  const size_t n = std::min(recorded.continuation.size(), found.size());
  for (size_t i = 0; i < n; ++i) {
    if (recorded.continuation[i] != found[i]) return {i, recorded.gap[i] < limit};
  }
  return {n, false};
}

}  // namespace longkv::test
