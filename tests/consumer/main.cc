// A complete program against the installed library.
#include <longkv/longkv.h>

#include <cstdio>

int main(int argc, char** argv) {
  auto engine = longkv::Engine::open({.model_path = argc > 1 ? argv[1] : "model.gguf", .context = 512});
  if (!engine.ok()) return std::fprintf(stderr, "%s\n", engine.status().message().c_str()), 1;
  if (auto s = engine->read(engine->tokenize("The capital of France is", true)); !s.ok()) return 1;
  auto ids = engine->generate({.max_tokens = 8, .temperature = 0},
                              [](std::string_view t) { return std::printf("%.*s", int(t.size()), t.data()) >= 0; });
  return ids.ok() ? 0 : 1;
}
