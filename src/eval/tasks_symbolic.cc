// GSM-Infinite's symbolic family: arithmetic along a forest of variables among others without a value.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "eval/tasks.h"
#include "eval/text.h"

namespace longkv {

namespace {

constexpr int kMostOperations = 8;
constexpr int64_t kReasoningTokens = 256;

struct Node {
  std::string name, statement;
  int64_t value = 0;
};

class Forest {
 public:
  explicit Forest(EvalRandom& random) : random_(random) {}

  // `n` nodes; a new tree begins with chance 1/4. Roots are constants, or, in noise, have no statement.
  std::vector<Node> grow(int64_t n, bool constant_roots) {
    std::vector<Node> nodes;
    for (int64_t i = 0; i < n; ++i) {
      Node node;
      node.name = name();
      if (nodes.empty() || random_.below(4) == 0) {
        node.value = random_.range(0, 10);
        if (constant_roots) node.statement = fmt::format("assign {} = {}.", node.name, node.value);
      } else {
        const Node& parent = nodes[size_t(random_.below(nodes.size()))];
        const int64_t step = random_.range(-1, 1);
        node.value = parent.value + step;
        node.statement = fmt::format("assign {} = {}{}.", node.name, parent.name,
                                     step < 0   ? " - 1"
                                     : step > 0 ? " + 1"
                                                : "");
      }
      nodes.push_back(std::move(node));
    }
    return nodes;
  }

 private:
  std::string name() {
    while (true) {
      std::string n = "V" + random_.digits(6);
      if (names_.insert(n).second) return n;
    }
  }

  EvalRandom& random_;
  std::set<std::string> names_;
};

EvalSample build_symbolic(const TaskRequest& request, int64_t n) {
  EvalRandom random(request.id.seed(), "forest");
  const int64_t operations = 1 + request.id.index % kMostOperations;
  Forest forest(random);
  const std::vector<Node> nodes = forest.grow(operations, true);
  const int64_t value = random.pick(nodes).value;
  EvalSample s;
  s.suite = "longkv";
  s.metric = EvalMetric::kVariableSet;
  std::vector<std::string> statements;
  for (const Node& node : nodes) {
    statements.push_back(node.statement);
    if (node.value == value) s.references.push_back(node.name);
  }
  s.facts = statements;
  EvalRandom noise(request.id.seed(), "noise");
  for (const Node& node : forest.grow(n, false)) {
    if (!node.statement.empty()) statements.push_back(node.statement);
  }
  noise.shuffle(statements);
  s.context =
      "The statements below assign values to variables. They may stand in any order, and not every variable has a "
      "known value.\n\n" +
      join(statements, " ");
  s.question = fmt::format(
      "\n\nWhich variables are known to have the value {}? Think it through, then end with \"Answer:\" and all of "
      "their "
      "names, separated by commas.",
      value);
  s.asked = fmt::format("the value {}", value);
  s.new_tokens = kReasoningTokens;
  return s;
}

}  // namespace

void add_symbolic_tasks(std::vector<EvalTask>& tasks) {
  tasks.push_back({"gsm_symbolic", 1, "variables with one value, after 1 to 8 operations (GSM-Infinite)", "statements",
                   2, 900000 / 2, false, false, build_symbolic});
}

}  // namespace longkv
