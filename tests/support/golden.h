// Recorded answers of Hugging Face transformers (tests/golden/models/, written by tests/golden/*_models.py).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace longkv::test {

// One prompt of a model. Row i of every list belongs to positions[i].
struct GoldenCase {
  std::string name;
  std::vector<int32_t> ids;
  std::vector<int64_t> positions;
  std::vector<std::vector<float>> logits;  // of Golden::columns, or of the whole vocabulary if that is empty
  std::vector<double> norms;               // Euclidean norm of the whole row
  std::vector<double> lse;                 // log-sum-exp of the whole row
  std::vector<int32_t> top;                // greedy choice
  std::vector<float> gap;                  // its logit minus the second best
};

// Greedy text, computed with a cache.
struct GoldenGreedy {
  std::vector<int32_t> prompt;
  std::vector<int32_t> continuation;
  std::vector<float> gap;  // per step: best minus second-best logit. Texts may part where this is a tie
};

struct Golden {
  std::string name;
  std::string model;  // file name: of tests/golden/models/ (tiny), models/ or a fetched model
  std::string family;
  int64_t vocab = 0;
  std::vector<int32_t> columns;
  std::vector<GoldenCase> cases;
  std::vector<GoldenGreedy> greedy;

  const GoldenCase& find(const std::string& case_name) const;
};

// Throws std::runtime_error when the recording is missing or contradicts itself.
Golden load_golden(const std::string& name);
// Names of the tiny random models, and the path of such a model's file.
std::vector<std::string> tiny_goldens();
std::string tiny_model(const std::string& name);

// |found - recorded| / |recorded| (Euclidean) over the recorded columns of row `row`; `found` is the whole row.
double relative_error(const Golden& golden, const GoldenCase& recorded, size_t row, std::span<const float> found);

// The step at which `found` parts from the recorded text, or its length. `tie`: the recorded gap there is below
// `limit`.
struct Parting {
  size_t step = 0;
  bool tie = false;
};
Parting first_parting(const GoldenGreedy& recorded, std::span<const int32_t> found, float limit = 1e-3F);

}  // namespace longkv::test
