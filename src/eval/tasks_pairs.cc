// Key-value retrieval: thousands of pairs of random uuids that look alike, one of which is asked for.
#include <fmt/format.h>

#include <cmath>

#include "eval/tasks.h"

namespace longkv {

namespace {

EvalSample build_kv(const TaskRequest& request, int64_t n) {
  const uint64_t seed = request.id.seed();
  EvalRandom random(seed, "pairs");
  // Successive samples ask for pairs spread evenly over the whole object, however many samples there are.
  constexpr double kGolden = 0.6180339887498949;
  const double place = std::fmod(0.5 + double(request.id.index) * kGolden, 1.0);
  const int64_t asked = std::min(n - 1, int64_t(place * double(n)));
  // The asked pair is drawn first: it is the same for every number of pairs.
  const std::string key = random.uuid(), value = random.uuid();
  EvalSample s;
  s.suite = "longkv";
  s.facts = {fmt::format("\"{}\": \"{}\"", key, value)};
  s.asked = key;
  s.references = {value};
  s.metric = EvalMetric::kWord;
  s.stop = "\"";
  std::string object = "{";
  for (int64_t i = 0; i < n; ++i) {
    if (i > 0) object += ", ";
    if (i == asked) {
      object += s.facts[0];
    } else {
      const std::string other = random.uuid();
      object += fmt::format("\"{}\": \"{}\"", other, random.uuid());
    }
  }
  object += "}";
  if (request.form == PromptForm::kNeedle10m) {
    s.context = "Extract the value of the specified key from the JSON object below.\n\nJSON data:\n" + object;
    s.question = fmt::format("\n\nKey: \"{}\"\nThe value of the specified key is: \"", key);
    return s;
  }
  s.context = "Look up the value that belongs to one key of this JSON object.\n\nJSON data:\n" + object;
  s.question = fmt::format("\n\nKey: \"{}\"\nWhat is the value of this key?", key);
  s.answer_prefix = fmt::format("The value of the key \"{}\" is \"", key);
  return s;
}

}  // namespace

void add_pair_tasks(std::vector<EvalTask>& tasks) {
  tasks.push_back({"kv_retrieval", 1, "the value of one of many uuid keys (InfiniteBench)", "pairs", 2,
                   int64_t(1) << 40, false, true, build_kv});
}

}  // namespace longkv
