// RULER's variable tracking: a chain of assignments through long text.
#include <fmt/format.h>

#include <algorithm>

#include "eval/tasks.h"
#include "eval/text.h"

namespace longkv {

namespace {

std::vector<std::string> variable_names(EvalRandom& random, int n, int letters) {
  std::vector<std::string> names;
  while (int(names.size()) < n) {
    std::string name = random.letters(letters, 'A');
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

struct Chain {
  std::vector<std::string> names;
  std::string value;
  std::vector<std::string> statements;
};

Chain make_chain(EvalRandom& random, std::vector<std::string> names) {
  Chain chain;
  chain.names = std::move(names);
  chain.value = random.digits(5);
  for (size_t i = 0; i < chain.names.size(); ++i) {
    chain.statements.push_back(i == 0 ? fmt::format("VAR {} = {}.", chain.names[0], chain.value)
                                      : fmt::format("VAR {} = VAR {}.", chain.names[i], chain.names[i - 1]));
  }
  return chain;
}

// The statements at random places in their order.
std::vector<Planted> placed(EvalRandom& random, const Chain& chain) {
  std::vector<double> depths;
  for (size_t i = 0; i < chain.statements.size(); ++i) depths.push_back(100 * random.unit());
  std::sort(depths.begin(), depths.end());
  std::vector<Planted> out;
  for (size_t i = 0; i < depths.size(); ++i) out.push_back({depths[i], chain.statements[i]});
  return out;
}

std::string ask(const std::string& value) {
  return fmt::format("\n\nWhich variables have the value {}? Name all of them.", value);
}

std::string answer_start(const Chain& chain) {
  return fmt::format("The {} variables that have the value {} are", chain.names.size(), chain.value);
}

// A short worked example; its names have three letters.
std::string example(EvalRandom& random) {
  const Chain chain = make_chain(random, variable_names(random, 5, 3));
  const std::string text = plant(noise_sentences(8), placed(random, chain), " ");
  return fmt::format("{}{}\n{} {}.\n\n", text, ask(chain.value), answer_start(chain), join(chain.names, " "));
}

EvalSample build_vt(const TaskRequest& request, int64_t n) {
  const uint64_t seed = request.id.seed();
  EvalRandom random(seed, "chains");
  EvalSample s;
  s.suite = "longkv";
  if (request.form == PromptForm::kNeedle10m) {
    // The model knows chains of one step and several chains in one text.
    std::vector<std::string> names = variable_names(random, 4, 5);
    const Chain chain = make_chain(random, {names[0], names[1]}), other = make_chain(random, {names[2], names[3]});
    std::vector<Planted> needles = placed(random, chain);
    for (Planted& p : placed(random, other)) needles.push_back(std::move(p));
    s.context = "Memorize and track the chains of variable assignment hidden in the following text.\n " +
                plant(request.haystack->sentences(EvalRandom(seed, "filler"), n), needles, " ") + " ";
    s.question = fmt::format("\nWhat is the value of VAR {0}? VAR {0} =", names[1]);
    s.references = {fmt::format("VAR {} = {}", names[0], chain.value)};
    s.distractors = {other.value};
    s.facts = chain.statements;
    s.asked = names[1];
    s.stop = ".";
    return s;
  }
  const std::string shown = example(random);
  const Chain chain = make_chain(random, variable_names(random, 5, 5));
  s.context =
      "Follow the assignments to variables in the texts below: a variable that is set to another one has its "
      "value.\n\n" +
      shown + plant(noise_sentences(n), placed(random, chain), " ");
  s.question = ask(chain.value);
  s.answer_prefix = answer_start(chain);
  s.references = chain.names;
  s.facts = chain.statements;
  s.asked = chain.value;
  s.stop = "\n\n";
  return s;
}

}  // namespace

void add_tracking_tasks(std::vector<EvalTask>& tasks) {
  tasks.push_back({"vt", 1, "variables that a chain of assignments gives one value (RULER)", "sentences", 10,
                   int64_t(1) << 40, false, true, build_vt});
}

}  // namespace longkv
