// A complete program against the installed library.
#include <longkv/longkv.h>

#include <cstdio>

int main(int argc, char** argv) {
  auto engine = longkv::Engine::open({.model_path = argc > 1 ? argv[1] : "model.gguf", .context = 512});
  if (!engine.ok()) return std::fprintf(stderr, "%s\n", engine.status().message().c_str()), 1;
  auto prompt = engine->tokenize("The capital of France is", /*add_bos=*/true);
  if (!prompt.ok() || !engine->read(*prompt).ok()) return 1;
  auto ids = engine->generate({.max_tokens = 8, .temperature = 0}, [](std::string_view text) {
    return std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  });
  return ids.ok() ? 0 : 1;
}
