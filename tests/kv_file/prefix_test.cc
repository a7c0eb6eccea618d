// Stored beginnings of prompts: a hit gives the bits of a miss, tiers hold to their budgets, and folders outlive a
// process.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "engine/prefix_cache.h"
#include "kv/prefix/reuse.h"
#include "kv_file/harness.h"

namespace longkv {
namespace {

using test::make;
using test::random_ids;
using test::tiny;

constexpr int64_t kChunk = 64;

std::unique_ptr<Session> session_of(const std::shared_ptr<const LoadedModel>& model, const std::string& kv,
                                    ThreadPool& pool, int64_t chunk = kChunk, int64_t slack = 0) {
  SessionOptions o;
  o.context = 2000;
  const auto recipe = parse_recipe(kv);
  EXPECT_TRUE(recipe.ok()) << kv << ": " << recipe.status().message();
  o.recipe = *recipe;
  o.chunk = chunk;
  o.window_slack = slack;
  auto session = Session::create(model, o, pool);
  EXPECT_TRUE(session.ok()) << kv << ": " << session.status().message();
  return std::move(session).value();
}

std::unique_ptr<PrefixCache> cache_of(const PrefixCacheOptions& options) {
  auto cache = PrefixCache::create(options);
  EXPECT_TRUE(cache.ok()) << cache.status().message();
  return std::move(cache).value();
}

std::vector<int32_t> joined(std::vector<int32_t> a, std::span<const int32_t> b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Logits after the prompt and after some more tokens.
std::vector<float> read_on(Session& s, std::span<const int32_t> rest, int64_t vocab) {
  if (!rest.empty()) {
    EXPECT_TRUE(s.prefill(rest).ok());
  }
  std::vector<float> all(s.logits().begin(), s.logits().end());
  for (const int32_t id : random_ids(6, vocab, 11)) {
    EXPECT_TRUE(s.decode(id).ok());
    all.insert(all.end(), s.logits().begin(), s.logits().end());
  }
  return all;
}

// Tokens taken over of `prompt`; the answer is compared with that of a session that reads all of it.
int64_t expect_hit_equals_miss(PrefixCache& cache, const std::shared_ptr<const LoadedModel>& model,
                               const std::string& kv, std::span<const int32_t> prompt, ThreadPool& pool,
                               int64_t chunk = kChunk, int64_t slack = 0) {
  const int64_t vocab = model->config().vocab;
  auto hit = session_of(model, kv, pool, chunk, slack), miss = session_of(model, kv, pool, chunk, slack);
  const int64_t usable = cache.usable(*hit, prompt);
  const auto tokens = cache.lookup(*hit, prompt);
  EXPECT_TRUE(tokens.ok()) << tokens.status().message();
  EXPECT_EQ(*tokens, usable);
  EXPECT_EQ(hit->tokens(), *tokens);
  const auto want = read_on(*miss, prompt, vocab);
  EXPECT_EQ(read_on(*hit, prompt.subspan(size_t(*tokens)), vocab), want)
      << kv << ", " << *tokens << " tokens taken over";
  return *tokens;
}

const char* const kAnyLength[] = {
    "full",
    "store=f32",
    "q8",
    "q4",
    "fp8",
    "quest:block=16,budget=64,dense_layers=0",
    "index=meandev(block=16) + select=topk(budget=64,sink=4,local=16)",
    "index=bits(block=16) + select=topk(budget=64,sink=4,local=16)",
    "index=minmax(block=16) + select=topk(budget=64,sink=4,local=16,token_step=3)",
    "index=minmax(block=16,coarse=4) + select=topk(budget=64,sink=4,local=16) + store=q8_0",
    "infllm:block=16,budget=96,sink=16,local=16",
    "ktransformers:block=16,budget=96,sink=16,local=16,preselect_queries=32",
    "ktransformers-preselect:block=16,budget=64,sink=16,local=16,preselect=3,preselect_queries=16",
    "sparq:budget=64,local=16,channels=8",
    "double_sparsity:budget=64,local=16,channels=8",
    "twilight:candidates=64,sink=4,local=16",
    "magicpig:sink=4,local=16,dense=\"0\",hash_bits=4,tables=20",
    "retroinfer:sink=4,local=16,budget=64,cluster=8,segment=256",
    "vattention:sink=4,local=16,budget=64",
};
const char* const kWhole[] = {"snapkv:budget=40,window=8",  "h2o:budget=40",
                              "streaming:budget=40",        "kivi2:window=32",
                              "think:window=32,queries=16", "keydiff:budget=40"};

TEST(PrefixCacheTest, AHitGivesTheBitsOfAMiss) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const int64_t vocab = model->config().vocab;
  const auto document = random_ids(310, vocab);
  for (const char* kv : kAnyLength) {
    auto cache = cache_of({.ram_bytes = 64 << 20});
    auto first = session_of(model, kv, pool);
    ASSERT_TRUE(first->prefill(joined(document, random_ids(30, vocab, 2))).ok());
    ASSERT_TRUE(cache->insert(*first).ok());
    EXPECT_EQ(cache->stats().stored, 1) << kv;
    // Another question, a longer one, the document alone, and the same prompt again.
    EXPECT_GE(expect_hit_equals_miss(*cache, model, kv, joined(document, random_ids(40, vocab, 3)), pool), 128) << kv;
    EXPECT_GE(expect_hit_equals_miss(*cache, model, kv, joined(document, random_ids(300, vocab, 4)), pool), 256) << kv;
    EXPECT_GE(expect_hit_equals_miss(*cache, model, kv, document, pool), 128) << kv;
    EXPECT_EQ(expect_hit_equals_miss(*cache, model, kv, joined(document, random_ids(30, vocab, 2)), pool), 340) << kv;
    // Nothing in common in the first block.
    EXPECT_EQ(expect_hit_equals_miss(*cache, model, kv, random_ids(300, vocab, 5), pool), 0) << kv;
  }
}

// What is copied into memory, what leaves it for the folder, and a file that is saved or checked come in pieces of
// bounded size, between which others have their turns.
TEST(PrefixCacheTest, LongCopiesPauseBetweenPieces) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const int64_t vocab = model->config().vocab;
  const std::string folder = ::testing::TempDir() + "longkv-pauses";
  std::filesystem::remove_all(folder);
  auto session = session_of(model, "store=f32", pool);
  ASSERT_TRUE(session->prefill(random_ids(1900, vocab)).ok());
  int pauses = 0;
  const Pause pause = [&] { ++pauses; };
  auto cache = cache_of({.ram_bytes = 64 << 20});
  ASSERT_TRUE(cache->insert(*session, {}, pause).ok());
  const auto bytes = int64_t(cache->stats().bytes_ram);
  ASSERT_GT(bytes, 1 << 20);
  EXPECT_GE(pauses, bytes >> 18);

  // Memory for one entry: the second sends the first to the folder.
  auto small = cache_of({.ram_bytes = uint64_t(bytes) + 4096, .folder = folder, .disk_bytes = 64 << 20});
  ASSERT_TRUE(small->insert(*session).ok());
  ASSERT_TRUE(session->truncate(0).ok());
  ASSERT_TRUE(session->prefill(random_ids(1900, vocab, 9)).ok());
  const int copied = std::exchange(pauses, 0);
  ASSERT_TRUE(small->insert(*session, {}, pause).ok());
  EXPECT_EQ(small->stats().entries_disk, 1);
  EXPECT_GE(pauses, copied + (bytes >> 20));

  pauses = 0;
  ASSERT_TRUE(save_session(*session, folder + "/saved", /*compress=*/false, pause).ok());
  EXPECT_GE(pauses, bytes >> 18);
  pauses = 0;
  KvRestoreOptions options;
  options.pause = pause;
  auto restored = session_of(model, "store=f32", pool);
  ASSERT_TRUE(restore_session(*restored, folder + "/saved", options).ok());
  EXPECT_GE(pauses, bytes >> 20);
  EXPECT_EQ(restored->ids(), session->ids());
  std::filesystem::remove_all(folder);
}

TEST(PrefixCacheTest, RecipesThatCannotBeCutReuseTheSamePromptAlone) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const int64_t vocab = model->config().vocab;
  const auto document = random_ids(300, vocab);
  for (const char* kv : kWhole) {
    EXPECT_FALSE(prefix_reuse(*parse_recipe(kv)).any_length) << kv;
    auto cache = cache_of({.ram_bytes = 64 << 20});
    auto first = session_of(model, kv, pool);
    ASSERT_TRUE(first->prefill(document).ok());
    ASSERT_TRUE(cache->insert(*first).ok());
    EXPECT_EQ(expect_hit_equals_miss(*cache, model, kv, document, pool), 300) << kv;
    EXPECT_EQ(expect_hit_equals_miss(*cache, model, kv, joined(document, random_ids(9, vocab, 2)), pool), 0) << kv;

    // As a next turn, where that is allowed: the bits of the session that was stored.
    auto turns = cache_of({.ram_bytes = 64 << 20, .continue_turns = true});
    ASSERT_TRUE(turns->insert(*first).ok());
    auto next = session_of(model, kv, pool);
    const auto more = random_ids(9, vocab, 2);
    ASSERT_EQ(*turns->lookup(*next, joined(document, more)), 300) << kv;
    EXPECT_EQ(read_on(*next, more, vocab), read_on(*first, more, vocab)) << kv;
  }
}

// Pieces of any length where products are whole numbers: nearly nothing is read again.
TEST(PrefixCacheTest, AHitGivesTheBitsOfAMissInARealModel) {
  const std::string path = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
  if (path.empty()) GTEST_SKIP() << "SmolLM2 is not here; scripts/fetch_models gets it";
  ThreadPool pool(2);
  const auto model = *LoadedModel::load(path);
  const int64_t vocab = model->config().vocab;
  const auto document = random_ids(215, vocab);
  auto cache = cache_of({.ram_bytes = 256 << 20});
  auto first = session_of(model, "full", pool);
  ASSERT_TRUE(first->prefill(joined(document, random_ids(20, vocab, 2))).ok());
  ASSERT_TRUE(cache->insert(*first).ok());
  for (const int64_t more : {1, 3, 4, 5, 9, 41, 42, 43, 80}) {
    const auto prompt = joined(document, random_ids(more, vocab, uint32_t(30 + more)));
    EXPECT_GE(expect_hit_equals_miss(*cache, model, "full", prompt, pool), 192) << more;
  }
  EXPECT_EQ(cache->stats().hits, 9);
  // The question alone is read: 42 tokens after 215 end in a piece of 64 that begins at 192.
  auto s = session_of(model, "full", pool);
  EXPECT_EQ(cache->usable(*s, joined(document, random_ids(42, vocab, 72))), 215);
}

TEST(PrefixCacheTest, SlidingWindowsAreCutWithinTheirSlack) {
  ThreadPool pool(2);
  const auto model = tiny("gemma3");
  const int64_t vocab = model->config().vocab;
  const auto document = random_ids(310, vocab);
  for (const int64_t slack : {0, 150}) {
    auto cache = cache_of({.ram_bytes = 64 << 20});
    auto first = session_of(model, "full", pool, kChunk, slack);
    ASSERT_TRUE(first->prefill(joined(document, random_ids(30, vocab, 2))).ok());
    ASSERT_TRUE(cache->insert(*first).ok());
    const int64_t tokens =
        expect_hit_equals_miss(*cache, model, "full", joined(document, random_ids(40, vocab, 3)), pool, kChunk, slack);
    EXPECT_EQ(tokens, slack > 0 ? 256 : 0);
  }
}

TEST(PrefixCacheTest, DecodedTokensAreReadAgain) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const int64_t vocab = model->config().vocab;
  auto cache = cache_of({.ram_bytes = 64 << 20});
  auto first = session_of(model, "full", pool);
  const auto prompt = random_ids(192, vocab);
  ASSERT_TRUE(first->prefill(prompt).ok());
  for (const int32_t id : random_ids(100, vocab, 2)) ASSERT_TRUE(first->decode(id).ok());
  ASSERT_TRUE(cache->insert(*first).ok());
  const auto next = joined(first->ids(), random_ids(30, vocab, 3));
  EXPECT_EQ(expect_hit_equals_miss(*cache, model, "full", next, pool), 192);
  auto turns = cache_of({.ram_bytes = 64 << 20, .continue_turns = true});
  ASSERT_TRUE(turns->insert(*first).ok());
  auto s = session_of(model, "full", pool);
  EXPECT_EQ(*turns->lookup(*s, next), 256);
}

TEST(PrefixCacheTest, SettingsAndSaltsKeepApart) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const auto ids = random_ids(300, model->config().vocab);
  auto cache = cache_of({.ram_bytes = 64 << 20});
  auto s = session_of(model, "full", pool);
  ASSERT_TRUE(s->prefill(ids).ok());
  ASSERT_TRUE(cache->insert(*s, "one user").ok());
  EXPECT_EQ(cache->usable(*s, ids, "one user"), 300);
  EXPECT_EQ(cache->usable(*s, ids, "another"), 0);
  EXPECT_EQ(cache->usable(*s, ids), 0);
  EXPECT_EQ(cache->usable(*session_of(model, "q8", pool), ids, "one user"), 0);
  EXPECT_EQ(cache->usable(*session_of(model, "full", pool, 128), ids, "one user"), 0);
  EXPECT_EQ(cache->usable(*session_of(tiny("qwen2"), "full", pool), ids, "one user"), 0);
}

TEST(PrefixCacheTest, EntriesThatContinueStoreWhatIsNew) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const int64_t vocab = model->config().vocab;
  const std::string folder = test::temp_path("continued");
  const auto document = random_ids(1400, vocab);
  uint64_t alone = 0;
  {
    auto cache = cache_of({.ram_bytes = 64 << 20, .folder = folder, .disk_bytes = 64 << 20});
    for (uint32_t q = 0; q < 4; ++q) {
      const auto prompt = joined(document, random_ids(20, vocab, 10 + q));
      auto s = session_of(model, "full", pool);
      const auto held = cache->lookup(*s, prompt);
      ASSERT_TRUE(held.ok());
      EXPECT_EQ(*held > 0, q > 0);
      ASSERT_TRUE(s->prefill(std::span(prompt).subspan(size_t(*held))).ok());
      ASSERT_TRUE(cache->insert(*s).ok());
      if (q == 0) alone = cache->stats().bytes_ram;
    }
    EXPECT_EQ(cache->stats().entries_ram, 4);
    EXPECT_LT(cache->stats().bytes_ram, 2 * alone);
    ASSERT_TRUE(cache->flush().ok());
    EXPECT_EQ(cache->stats().entries_disk, 4);
    EXPECT_LT(cache->stats().bytes_disk, 2 * alone);
  }
  // Another process: bases are found and opened by themselves.
  auto cache = cache_of({.folder = folder, .disk_bytes = 64 << 20});
  EXPECT_EQ(cache->stats().entries_disk, 4);
  for (uint32_t q = 0; q < 4; ++q) {
    EXPECT_EQ(expect_hit_equals_miss(*cache, model, "full", joined(document, random_ids(20, vocab, 10 + q)), pool),
              1420);
  }
  // Without its base an entry is of no use.
  std::vector<std::filesystem::path> files;
  for (const auto& f : std::filesystem::directory_iterator(folder)) files.push_back(f.path());
  const auto largest = *std::max_element(files.begin(), files.end(), [](const auto& a, const auto& b) {
    return std::filesystem::file_size(a) < std::filesystem::file_size(b);
  });
  std::filesystem::remove(largest);
  auto poor = cache_of({.folder = folder, .disk_bytes = 64 << 20});
  EXPECT_EQ(poor->stats().entries_disk, 0);
  EXPECT_EQ(poor->stats().ignored_files, 3);
}

TEST(PrefixCacheTest, TiersHoldToTheirBudgets) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const int64_t vocab = model->config().vocab;
  auto one = session_of(model, "full", pool);
  ASSERT_TRUE(one->prefill(random_ids(300, vocab)).ok());
  auto probe = cache_of({.ram_bytes = 64 << 20});
  ASSERT_TRUE(probe->insert(*one).ok());
  const uint64_t each = probe->stats().bytes_ram;

  const std::string folder = test::temp_path("budgets");
  auto cache = cache_of({.ram_bytes = 3 * each, .folder = folder, .disk_bytes = 4 * each});
  for (uint32_t i = 0; i < 12; ++i) {
    auto s = session_of(model, "full", pool);
    ASSERT_TRUE(s->prefill(random_ids(300, vocab, 100 + i)).ok());
    ASSERT_TRUE(cache->insert(*s).ok());
    const PrefixCacheStats stats = cache->stats();
    EXPECT_LE(stats.bytes_ram, 3 * each);
    EXPECT_LE(stats.bytes_disk, 4 * each);
  }
  const PrefixCacheStats stats = cache->stats();
  EXPECT_EQ(stats.stored, 12);
  EXPECT_EQ(stats.entries_ram, 3);
  EXPECT_EQ(stats.entries_disk, 4);
  EXPECT_EQ(stats.evicted_ram, 9);
  // The newest are there, from memory and from the folder; the oldest are gone.
  EXPECT_EQ(expect_hit_equals_miss(*cache, model, "full", random_ids(300, vocab, 111), pool), 300);
  EXPECT_EQ(expect_hit_equals_miss(*cache, model, "full", random_ids(300, vocab, 106), pool), 300);
  EXPECT_EQ(expect_hit_equals_miss(*cache, model, "full", random_ids(300, vocab, 100), pool), 0);
  ASSERT_TRUE(cache->clear().ok());
  EXPECT_EQ(cache->stats().bytes_ram + cache->stats().bytes_disk, 0U);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

// A long session costs more to read again than short ones: a few of them do not push it out.
TEST(PrefixCacheTest, ShortSideTasksDoNotWipeALongSession) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const int64_t vocab = model->config().vocab;
  auto s = session_of(model, "full", pool), small = session_of(model, "full", pool);
  const auto document = random_ids(1500, vocab);
  ASSERT_TRUE(s->prefill(document).ok());
  ASSERT_TRUE(small->prefill(random_ids(130, vocab, 2)).ok());
  auto probe = cache_of({.ram_bytes = 64 << 20});
  ASSERT_TRUE(probe->insert(*s).ok());
  const uint64_t large = probe->stats().bytes_ram;
  ASSERT_TRUE(probe->insert(*small).ok());
  const uint64_t each = probe->stats().bytes_ram - large;

  auto cache = cache_of({.ram_bytes = large + 3 * each});
  ASSERT_TRUE(cache->insert(*s).ok());
  for (uint32_t i = 0; i < 10; ++i) {
    auto t = session_of(model, "full", pool);
    ASSERT_TRUE(t->prefill(random_ids(130, vocab, 50 + i)).ok());
    ASSERT_TRUE(cache->insert(*t).ok());
  }
  EXPECT_GT(cache->stats().evicted_ram, 0);
  EXPECT_EQ(cache->usable(*s, document), 1500);
}

TEST(PrefixCacheTest, BadFilesOfAFolderAreIgnoredAndCounted) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const int64_t vocab = model->config().vocab;
  const std::string folder = test::temp_path("bad_files");
  {
    auto cache = cache_of({.ram_bytes = 64 << 20, .folder = folder, .disk_bytes = 64 << 20});
    for (uint32_t i = 0; i < 3; ++i) {
      auto s = session_of(model, "full", pool);
      ASSERT_TRUE(s->prefill(random_ids(300, vocab, i)).ok());
      ASSERT_TRUE(cache->insert(*s).ok());
    }
    ASSERT_TRUE(cache->flush().ok());
  }
  std::vector<std::string> paths;
  for (const auto& f : std::filesystem::directory_iterator(folder)) paths.push_back(f.path().string());
  ASSERT_EQ(paths.size(), 3U);
  std::sort(paths.begin(), paths.end());
  // One is cut, one has a damaged row that only its sum shows, and there is a stranger.
  std::filesystem::resize_file(paths[0], std::filesystem::file_size(paths[0]) / 2);
  {
    const auto file = *KvFile::open(paths[1]);
    const uint64_t at = file->find("kv.cache.l1.h0.v")->offset + 100;
    std::fstream out(paths[1], std::ios::in | std::ios::out | std::ios::binary);
    out.seekg(std::streamoff(at));
    const char was = char(out.get());
    out.seekp(std::streamoff(at));
    out.put(char(was ^ 4));
  }
  std::ofstream(folder + "/stranger.kv") << "not a KV file at all, and long enough to be looked at as if it were one; "
                                            "it has more than the 128 bytes of header and footer.....................";
  auto cache = cache_of({.folder = folder, .disk_bytes = 64 << 20});
  EXPECT_EQ(cache->stats().ignored_files, 2);
  EXPECT_EQ(cache->stats().entries_disk, 2);
  int64_t hits = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    const auto ids = random_ids(300, vocab, i);
    auto s = session_of(model, "full", pool), fresh = session_of(model, "full", pool);
    const auto held = cache->lookup(*s, ids);
    ASSERT_TRUE(held.ok());
    hits += *held > 0 ? 1 : 0;
    EXPECT_EQ(read_on(*s, std::span(ids).subspan(size_t(*held)), vocab), read_on(*fresh, ids, vocab));
  }
  EXPECT_EQ(hits, 1);
  EXPECT_EQ(cache->stats().entries_disk, 1);  // the damaged one was dropped when its sums were checked
}

TEST(PrefixCacheTest, FoldersThatOthersWriteToAreRefused) {
  const std::string folder = test::temp_path("shared_folder");
  std::filesystem::create_directory(folder);
  ASSERT_EQ(::chmod(folder.c_str(), 0777), 0);
  const auto refused = PrefixCache::create({.folder = folder});
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("others may write"), std::string::npos);
  EXPECT_EQ(PrefixCache::create({.folder = "/proc/nowhere/x"}).status().code(), Code::kIo);
}

}  // namespace
}  // namespace longkv
