// Time to parse a chat template and to render conversations: many turns, and one document of megabytes.
//   template_bench TEMPLATE.jinja
#include <benchmark/benchmark.h>

#include <cstdio>
#include <fstream>
#include <iterator>

#include "chat/template.h"

namespace longkv {
namespace {

using Json = nlohmann::ordered_json;

void parse(benchmark::State& state, const std::string& text) {
  for (auto _ : state) benchmark::DoNotOptimize(ChatTemplate::parse(text));
}

void render(benchmark::State& state, const ChatTemplate& chat_template, const Json& messages) {
  TemplateInput input;
  input.messages = &messages;
  input.add_generation_prompt = true;
  input.bos_token = "";
  input.eos_token = "";
  for (auto _ : state) {
    const auto pieces = chat_template.render(input);
    if (!pieces.ok()) {
      state.SkipWithError(pieces.status().message().c_str());
      return;
    }
    benchmark::DoNotOptimize(pieces->data());
  }
}

}  // namespace
}  // namespace longkv

int main(int argc, char** argv) {
  using namespace longkv;
  benchmark::Initialize(&argc, argv);
  std::ifstream file(argc > 1 ? argv[1] : "", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  static auto parsed = ChatTemplate::parse(text);
  if (text.empty() || !parsed.ok()) {
    std::fprintf(stderr, "usage: template_bench TEMPLATE.jinja\n%s\n", parsed.status().message().c_str());
    return 2;
  }
  static Json turns = Json::array();
  for (int i = 0; i < 1000; ++i) {
    turns.push_back({{"role", "user"}, {"content", "What comes after " + std::to_string(i) + "?"}});
    turns.push_back({{"role", "assistant"}, {"content", std::string(200, 'a')}});
  }
  turns.push_back({{"role", "user"}, {"content", "And now?"}});
  static const Json document =
      Json::array({{{"role", "user"}, {"content", std::string(8 << 20, 'd') + "\nWhat does it say?"}}});
  benchmark::RegisterBenchmark("parse", [&](benchmark::State& s) { parse(s, text); });
  benchmark::RegisterBenchmark("render_2001_messages", [](benchmark::State& s) { render(s, *parsed, turns); });
  benchmark::RegisterBenchmark("render_8_MiB", [](benchmark::State& s) { render(s, *parsed, document); });
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
