// Stored beginnings behind the slots, through HTTP: a hit gives the bits of a miss in every slot, under every recipe,
// after a restart; salts and keys keep clients apart; budgets hold; damage costs reading only.
#include <filesystem>
#include <fstream>

#include "engine/prefix_cache.h"
#include "harness.h"

namespace longkv::server {
namespace {

namespace fs = std::filesystem;

const char* const kRecipes[] = {"q8",
                                "quest:block=16,budget=64,dense_layers=0",
                                "infllm:block=16,budget=96,sink=16,local=16",
                                "magicpig:sink=4,local=16,dense=\"0\",hash_bits=4,tables=20",
                                "retroinfer:sink=4,local=16,budget=64,cluster=8,segment=256",
                                "snapkv:budget=40,window=8",
                                "streaming:budget=40",
                                "kivi2:window=32"};

// Two slots with a cache; pieces of 32 tokens, so that what is taken over of the tiny model is not rounded to nothing.
TestServer::Change with_cache(const PrefixCacheOptions& options, bool keys = false) {
  return [=](ServiceOptions& s, HttpOptions& h) {
    auto cache = PrefixCache::create(options);
    ASSERT_TRUE(cache.ok()) << cache.status().message();
    s.scheduler.prefixes = std::move(cache).value();
    s.scheduler.session.chunk = 32;
    for (const char* text : kRecipes) {
      const auto recipe = parse_recipe(text);
      ASSERT_TRUE(recipe.ok()) << text << ": " << recipe.status().message();
      s.recipes.push_back({text, std::make_shared<const Recipe>(*recipe)});
    }
    h.metrics = true;
    if (keys) h.api_keys = {"one", "two"};
  };
}

std::string letters(int64_t n, uint32_t seed) {
  std::string text;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    text += char('a' + (seed >> 16) % 26);
  }
  return text;
}

struct Answer {
  int64_t cached = 0;
  std::string from;
  json content;  // text and probabilities of every token
};

Answer ask(TestServer& server, const std::string& prompt, json more, const std::string& headers = "") {
  json body = completion(prompt, {{"max_tokens", 12}, {"logprobs", 2}, {"ignore_eos", true}});
  body.update(more);
  const Reply reply = server.post_text("/v1/completions", body.dump(), headers);
  EXPECT_EQ(reply.status, 200) << reply.body;
  const json j = reply.parsed();
  Answer a;
  a.cached = j["usage"]["prompt_tokens_details"]["cached_tokens"];
  a.from = j["timings"].value("cache_from", "");
  a.content = {j["choices"][0]["text"], j["choices"][0]["logprobs"]};
  return a;
}

double metric(TestServer& server, const std::string& name, const std::string& headers = "") {
  const std::string text = "\n" + server.send(request_text("GET", "/metrics", "", headers)).body;
  const size_t at = text.find("\n" + name + " ");
  EXPECT_NE(at, std::string::npos) << name;
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + name.size() + 2);
}

bool until(const std::function<bool()>& holds) {
  for (int i = 0; i < 500; ++i) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

std::string new_folder(const std::string& name) {
  const std::string folder = test::temp_path(name);
  fs::remove_all(folder);
  return folder;
}

TEST(Prefixes, AHitInAnotherSlotGivesTheBitsOfAMiss) {
  TestServer server(with_cache({.ram_bytes = 64 << 20}));
  const std::string document = letters(350, 1);
  std::vector<const char*> recipes(std::begin(kRecipes), std::end(kRecipes));
  recipes.push_back("full");
  for (const char* kv : recipes) {
    const std::string first = document + letters(20, 2), second = document + letters(30, 3);
    const Answer miss = ask(server, first, {{"kv", kv}, {"id_slot", 0}});
    EXPECT_EQ(miss.cached, 0) << kv;
    // The very same prompt, for every recipe; then another end, where the recipe allows it.
    const Answer same = ask(server, first, {{"kv", kv}, {"id_slot", 1}});
    EXPECT_EQ(same.cached, 370) << kv;
    EXPECT_EQ(same.from, "cache");
    EXPECT_EQ(same.content, miss.content) << kv;
    const Answer other = ask(server, second, {{"kv", kv}, {"id_slot", 1}});
    const Answer read = ask(server, second, {{"kv", kv}, {"id_slot", 1}, {"kv_reuse", "none"}});
    EXPECT_EQ(read.cached, 0);
    EXPECT_EQ(other.content, read.content) << kv << ", " << other.cached << " taken over";
    const bool whole_only = std::string(kv).starts_with("snapkv") || std::string(kv).starts_with("streaming") ||
                            std::string(kv).starts_with("kivi");
    EXPECT_EQ(other.cached > 0, !whole_only) << kv;
  }
  EXPECT_GE(metric(server, "longkv:prefix_cache_hit_tokens_total"), 370 * 9);
  EXPECT_GT(metric(server, "longkv:kv_bytes{tier=\"cpu_cache\"}"), 0);
  EXPECT_EQ(metric(server, "longkv:kv_bytes{tier=\"disk\"}"), 0);
}

TEST(Prefixes, AFolderOutlivesTheServer) {
  const std::string folder = new_folder("prefix-restart");
  const std::string document = letters(400, 4);
  std::map<std::string, Answer> before;
  const PrefixCacheOptions options{.ram_bytes = 64 << 20, .folder = folder, .disk_bytes = 64 << 20};
  {
    TestServer server(with_cache(options));
    for (const char* kv : kRecipes) before[kv] = ask(server, document, {{"kv", kv}});
    // Written while the server rests.
    EXPECT_TRUE(until([&] { return metric(server, "longkv:prefix_cache_entries{tier=\"disk\"}") == 8; }));
  }
  TestServer server(with_cache(options));
  for (const char* kv : kRecipes) {
    const Answer after = ask(server, document, {{"kv", kv}});
    EXPECT_EQ(after.cached, 400) << kv;
    EXPECT_EQ(after.content, before[kv].content) << kv;
  }
  const Answer other = ask(server, document.substr(0, 300) + letters(40, 5), {{"kv", "q8"}});
  EXPECT_EQ(other.cached, 288);
  EXPECT_EQ(other.content,
            ask(server, document.substr(0, 300) + letters(40, 5), {{"kv", "q8"}, {"kv_reuse", "none"}}).content);
  EXPECT_EQ(metric(server, "longkv:prefix_cache_ignored_files_total"), 0);
}

TEST(Prefixes, SaltsAndKeysShareNothing) {
  TestServer server(with_cache({.ram_bytes = 64 << 20}, /*keys=*/true));
  const std::string one = "Authorization: Bearer one\r\n", two = "X-Api-Key: two\r\n";
  const std::string document = letters(400, 6);
  EXPECT_EQ(ask(server, document, {{"cache_salt", "a"}, {"id_slot", 0}}, one).cached, 0);
  EXPECT_EQ(ask(server, document, {{"cache_salt", "b"}, {"id_slot", 1}}, one).cached, 0) << "another salt";
  EXPECT_EQ(ask(server, document, {{"cache_salt", "a"}, {"id_slot", 1}}, two).cached, 0) << "another key";
  EXPECT_EQ(ask(server, document, {{"id_slot", 1}}, one).cached, 0) << "no salt";
  const Answer own = ask(server, document, {{"cache_salt", "a"}, {"id_slot", 1}}, one);
  EXPECT_EQ(own.cached, 400);
  EXPECT_EQ(own.from, "cache");
}

TEST(Prefixes, BudgetsHold) {
  const std::string folder = new_folder("prefix-budget");
  // Two tiers of about three and six of the entries below.
  constexpr int64_t kEntry = 240 << 10;
  TestServer server(with_cache({.ram_bytes = 3 * kEntry, .folder = folder, .disk_bytes = 6 * kEntry}));
  for (uint32_t i = 0; i < 20; ++i) {
    ask(server, letters(400, 100 + i), json::object());
    EXPECT_LE(metric(server, "longkv:kv_bytes{tier=\"cpu_cache\"}"), 3 * kEntry);
    EXPECT_LE(metric(server, "longkv:kv_bytes{tier=\"disk\"}"), 6 * kEntry);
  }
  EXPECT_GT(metric(server, "longkv:prefix_cache_evicted_total{tier=\"cpu_cache\"}"), 0);
  EXPECT_GT(metric(server, "longkv:prefix_cache_evicted_total{tier=\"disk\"}"), 0);
  uint64_t bytes = 0;
  for (const auto& file : fs::directory_iterator(folder)) bytes += fs::file_size(file.path());
  EXPECT_LE(bytes, 6 * kEntry);
  EXPECT_GT(bytes, 0);
  // `none` neither takes nor stores.
  const double stored = metric(server, "longkv:prefix_cache_stored_total");
  ask(server, letters(400, 999), {{"kv_reuse", "none"}});
  EXPECT_EQ(metric(server, "longkv:prefix_cache_stored_total"), stored);
}

TEST(Prefixes, DamageCostsReadingOnly) {
  const std::string folder = new_folder("prefix-damage");
  const PrefixCacheOptions options{.ram_bytes = 64 << 20, .folder = folder, .disk_bytes = 64 << 20};
  const std::string documents[] = {letters(400, 7), letters(400, 8)};
  std::vector<Answer> before;
  {
    TestServer server(with_cache(options));
    for (const std::string& d : documents) before.push_back(ask(server, d, json::object()));
    EXPECT_TRUE(until([&] { return metric(server, "longkv:prefix_cache_entries{tier=\"disk\"}") == 2; }));
  }
  // One file loses its end, the other a bit in the middle of its rows.
  std::vector<fs::path> files;
  for (const auto& file : fs::directory_iterator(folder)) files.push_back(file.path());
  ASSERT_EQ(files.size(), 2u);
  fs::resize_file(files[0], fs::file_size(files[0]) / 2);
  {
    std::fstream file(files[1], std::ios::in | std::ios::out | std::ios::binary);
    const auto middle = std::streamoff(fs::file_size(files[1]) / 2);
    char byte = 0;
    file.seekg(middle).read(&byte, 1);
    byte = char(byte ^ 4);
    file.seekp(middle).write(&byte, 1);
  }
  TestServer server(with_cache(options));
  EXPECT_EQ(metric(server, "longkv:prefix_cache_ignored_files_total"), 1);
  for (size_t i = 0; i < 2; ++i) {
    const Answer after = ask(server, documents[i], json::object());
    EXPECT_EQ(after.cached, 0);
    EXPECT_EQ(after.content, before[i].content);
  }
  // And both are stored anew.
  const Answer stored = ask(server, documents[0], {{"id_slot", 1}});
  EXPECT_GE(stored.cached, 384);
  EXPECT_EQ(stored.content, before[0].content);
}

// Sliding windows, int8 products: a real model of each kind, over a longer text.
TEST(Prefixes, RealModels) {
  for (const char* name : {"SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"}) {
    const std::string path = test::fetched_model(name);
    if (path.empty()) GTEST_SKIP() << name << " was not fetched";
    TestServer server(
        [](ServiceOptions& s, HttpOptions&) {
          s.scheduler.prefixes = *PrefixCache::create({.ram_bytes = 1 << 30});
          s.scheduler.session.window_slack = 256;
        },
        path);
    std::string document;
    for (int i = 0; i < 130; ++i) document += "Mill " + std::to_string(i) + " stands beside the river. ";
    ask(server, document + "Which is the last?", {{"id_slot", 0}});
    const json second = {{"id_slot", 1}};
    const Answer hit = ask(server, document + "Where do they stand?", second);
    EXPECT_GT(hit.cached, 1000) << name;
    EXPECT_EQ(hit.from, "cache");
    json anew = second;
    anew["kv_reuse"] = "none";
    EXPECT_EQ(hit.content, ask(server, document + "Where do they stand?", anew).content) << name;
  }
}

}  // namespace
}  // namespace longkv::server
