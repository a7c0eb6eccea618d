// A state saved and restored goes on exactly as if it had never left: every stage, every family, odd sizes.
#include <fstream>

#include "kv/mask/leank.h"
#include "kv_file/harness.h"
#include "longkv/longkv.h"

namespace longkv {
namespace {

using test::go_on;
using test::make;
using test::random_ids;
using test::tiny;

// Recipes that hold different kinds of state, at sizes that 200 tokens use. MASK and GATES stand for files.
const char* const kRecipes[] = {
    "full",
    "store=f32",
    "store=bf16",
    "q8",
    "q4",
    "fp8",
    "store=q8_0(v=q4_0)",
    "quest:block=16,budget=64,dense_layers=0",
    "index=minmax(block=16,summary=q8) + select=topk(budget=64,sink=4,local=16)",
    "index=minmax(block=16) + select=topk(budget=64,sink=4,local=16) + store=q8_0",
    "index=mean(block=16) + select=topk(budget=64,sink=4,local=16,heads=shared)",
    "index=max(block=8) + select=topk(budget=64,sink=4,local=16,heads=query)",
    "index=fixed(block=16,reps=2) + select=topk(budget=64,sink=4,local=16)",
    "index=meandev(block=16) + select=topk(budget=64,sink=4,local=16)",
    "index=cuboid(block=16) + select=topk(budget=64,sink=4,local=16)",
    "index=bits(block=16) + select=topk(budget=64,sink=4,local=16)",
    "index=bits(block=1,width=2) + select=topk(budget=64,sink=4,local=16)",
    "index=minmax(block=16) + select=topk(budget=64,sink=4,local=16,token_step=5)",
    "index=minmax(block=16) + select=topk(budget=64,sink=4,local=16,layer_step=2,token_step=3)",
    "index=minmax(block=16,coarse=4) + select=topk(budget=64,sink=4,local=16)",
    "infllm:block=16,budget=96,sink=16,local=16",
    "ktransformers:block=16,budget=96,sink=16,local=16",
    "ktransformers-preselect:block=16,budget=64,sink=16,local=16,preselect=3,preselect_queries=16",
    "onebit:budget=64,sink=4,local=16",
    "sparq:budget=64,local=16,channels=8",
    "double_sparsity:budget=64,local=16,channels=8",
    "twilight:candidates=64,sink=4,local=16",
    "magicpig:sink=4,local=16,dense=\"0\",hash_bits=4,tables=20",
    "retroinfer:sink=4,local=16,budget=64,cluster=8,segment=256",
    "vattention:sink=4,local=16,budget=64",
    "streaming:budget=40",
    "keep=streaming(sink=4,window=30,positions=cache)",
    "h2o:budget=40",
    "h2o:budget=40,store=q8_0",
    "tova:budget=40",
    "snapkv:budget=40,window=8",
    "snapkv:budget=96,window=8 + index=minmax(block=16) + select=topk(budget=64,sink=4,local=16)",
    "pyramidkv:budget=40,window=8",
    "keydiff:budget=40",
    "knorm:budget=40",
    "adakv:budget=40,window=8",
    "expected_attention:budget=40",
    "duo:gates=\"GATES\",sink=4,window=20",
    "normmass:budget=40,sink=4,window=8",
    "kvslimmer:budget=40,sink=4,window=8",
    "asymkv:budget=40,sink=4,window=8",
    "asymkv-release:budget=40,sink=4",
    "kvzip:keep_ratio=0.5,chunk=64",
    "fastgen:recovery=0.5",
    "kivi2:window=32",
    "kivi4:window=32,sink=8",
    "store=q8_0(window=40,sink=4)",
    "snapkv:budget=128,window=8 + store=kivi4(window=32)",
    "think:window=32,queries=16",
    "think:window=32,queries=16 + store=q8_0(window=32)",
    "leank:mask=\"MASK\",sink=4,window=32",
    "leank:mask=\"MASK\",sink=4,window=32 + store=fp8(window=32)",
};

std::string with_files(std::string kv, const KvShape& shape) {
  const auto put = [&](const std::string& word, const std::string& path) {
    const size_t at = kv.find(word);
    if (at != std::string::npos) kv.replace(at, word.size(), path);
  };
  const std::string mask = test::temp_path("mask.gguf"), gates = test::temp_path("gates.tsv");
  // The first head keeps no channel of K, the others half of them.
  std::vector<float> alpha(size_t(shape.layers) * size_t(shape.kv_heads) * size_t(shape.dim_k));
  for (size_t i = 0; i < alpha.size(); ++i) {
    alpha[i] = i >= size_t(shape.dim_k) && i % size_t(shape.dim_k) < size_t(shape.dim_k) / 2 ? 0.5f : 0.0f;
  }
  LeankMask learned = mask_of_factors(alpha, shape.dim_k);
  learned.sink = 4;
  learned.window = 32;
  learned.compensate = true;
  learned.heads[0].removed = RemovedAs::kMean;
  // The last head holds directions.
  HeadMask& last = learned.heads.back();
  last = HeadMask{};
  for (int64_t i = 0; i < int64_t(shape.dim_k) / 2 * shape.dim_k; ++i) last.keys.push_back(float(i % 7) / 16 - 0.2f);
  last.queries = last.keys;
  EXPECT_TRUE(save_leank_sidecar(mask, shape, learned).ok());
  std::ofstream out(gates);
  for (int l = 0; l < shape.layers; ++l) {
    for (int h = 0; h < shape.kv_heads; ++h) out << (l + h) % 2 << (h + 1 < shape.kv_heads ? "\t" : "\n");
  }
  put("MASK", mask);
  put("GATES", gates);
  return kv;
}

// Reads `n` tokens and decodes some; what is saved then, restored and saved again is the same file, and goes on with
// the same bits as a session that was left alone.
void expect_exact(const std::shared_ptr<const LoadedModel>& model, const std::string& kv, int64_t n, bool compress,
                  ThreadPool& pool) {
  SCOPED_TRACE(kv + ", " + std::to_string(n) + " tokens of " + model->config().family);
  const int64_t vocab = model->config().vocab;
  const auto ids = random_ids(n, vocab), more = random_ids(7, vocab, 2), prompt = random_ids(21, vocab, 3);
  const auto decode = [&](Session& s) {
    for (int32_t id : random_ids(n % 3 == 0 ? 0 : 4, vocab, 4)) ASSERT_TRUE(s.decode(id).ok());
  };
  auto alone = make(model, kv, pool);
  ASSERT_NE(alone, nullptr);
  const Status read = alone->prefill(ids);
  ASSERT_TRUE(read.ok()) << read.message();
  decode(*alone);

  auto saved = make(model, kv, pool);
  ASSERT_TRUE(saved->prefill(ids).ok());
  decode(*saved);
  const std::string path = test::temp_path("state.kv"), again = test::temp_path("again.kv");
  const auto written = save_session(*saved, path, compress);
  ASSERT_TRUE(written.ok()) << written.status().message();
  EXPECT_EQ(*written, test::file_bytes(path).size());

  // Another capacity: arrays lie elsewhere.
  auto restored = make(model, kv, pool, 700);
  const auto result = restore_session(*restored, path);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->tokens, alone->tokens());
  EXPECT_EQ(restored->ids(), alone->ids());
  ASSERT_TRUE(save_session(*restored, again, compress).ok());
  const std::string first = test::file_bytes(path), second = test::file_bytes(again);
  // The context is part of the file and differs.
  EXPECT_EQ(first.size(), second.size());

  const std::vector<float> want = go_on(*alone, more, prompt);
  EXPECT_EQ(go_on(*restored, more, prompt), want);
  EXPECT_EQ(go_on(*saved, more, prompt), want);
}

TEST(KvFileRoundTrip, EveryKindOfRecipeGoesOnBitForBit) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  for (const char* text : kRecipes) {
    const std::string kv = with_files(text, model->config().kv_shape());
    for (const int64_t n : {1, 33, 64, 200}) {
      expect_exact(model, kv, n, false, pool);
    }
  }
}

TEST(KvFileRoundTrip, EveryFamily) {
  ThreadPool pool(2);
  for (const char* name : {"gemma3", "gemma3-linear-softcap", "internlm2", "llama-llama3", "llama-mqa-tied",
                           "llama-ntk", "llama-yarn", "phi3", "phi3-longrope", "qwen2", "qwen3"}) {
    const auto model = tiny(name);
    for (const char* kv : {"full", "index=minmax(block=16) + select=topk(budget=64,sink=4,local=16)",
                           "snapkv:budget=40,window=8", "h2o:budget=40", "store=fp8(window=40)"}) {
      for (const int64_t n : {1, 63, 130}) expect_exact(model, kv, n, false, pool);
    }
  }
}

TEST(KvFileRoundTrip, SizesAroundPages) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  const KvShape shape = model->config().kv_shape();
  const int64_t rows = kStatePage / kv_row_bytes(KvType::kF16, shape.dim_k);  // of K in a page
  for (const int64_t n : {rows - 1, rows, rows + 1, 2 * rows - 4, 2 * rows - 3, 2 * rows}) {
    if (n < 1 || n > 450) continue;
    for (const char* kv :
         {"full", "kivi4:window=32,sink=8", "index=bits(block=16) + select=topk(budget=64,sink=4,local=16)"}) {
      expect_exact(model, kv, n, false, pool);
    }
  }
}

TEST(KvFileRoundTrip, CompressedFilesToo) {
  ThreadPool pool(2);
  const auto model = tiny("qwen3");
  for (const char* kv :
       {"full", "q4", "quest:block=16,budget=64,dense_layers=0", "snapkv:budget=40,window=8", "kivi2:window=32"}) {
    expect_exact(model, kv, 201, true, pool);
  }
}

TEST(KvFileRoundTrip, AnEmptySessionToo) {
  ThreadPool pool(2);
  const auto model = tiny("llama");
  auto empty = make(model, "full", pool), restored = make(model, "full", pool);
  const std::string path = test::temp_path("empty.kv");
  ASSERT_TRUE(save_session(*empty, path).ok());
  const auto ids = random_ids(30, model->config().vocab);
  ASSERT_TRUE(restored->prefill(ids).ok());
  ASSERT_TRUE(restore_session(*restored, path).ok());
  EXPECT_EQ(restored->tokens(), 0);
  ASSERT_TRUE(restored->prefill(ids).ok());
  ASSERT_TRUE(empty->prefill(ids).ok());
  EXPECT_TRUE(std::ranges::equal(restored->logits(), empty->logits()));
}

TEST(KvFileRoundTrip, ThroughThePublicInterface) {
  const std::string path = test::temp_path("engine.kv");
  const EngineOptions options{.model_path = test::tiny_model("llama"), .context = 512};
  auto first = Engine::open(options), second = Engine::open(options);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(first->read(random_ids(60, first->vocabulary())).ok());
  ASSERT_TRUE(first->save(path).ok());
  ASSERT_TRUE(second->restore(path).ok());
  EXPECT_EQ(second->tokens(), 60);
  ASSERT_TRUE(first->feed(3).ok());
  ASSERT_TRUE(second->feed(3).ok());
  EXPECT_TRUE(std::ranges::equal(first->logits(), second->logits()));
  EXPECT_EQ(second->restore(path + ".missing").code(), Code::kIo);
}

// Restored rows belong to the session: cutting, growing and evicting must not reach the file.
TEST(KvFileRoundTrip, ARestoredSessionLeavesTheFileAlone) {
  ThreadPool pool(2);
  const auto model = tiny("llama");
  const auto ids = random_ids(300, model->config().vocab);
  auto s = make(model, "full", pool);
  ASSERT_TRUE(s->prefill(ids).ok());
  const std::string path = test::temp_path("kept.kv");
  ASSERT_TRUE(save_session(*s, path).ok());
  const std::string before = test::file_bytes(path);
  auto restored = make(model, "full", pool), fresh = make(model, "full", pool);
  const auto result = restore_session(*restored, path);
  ASSERT_TRUE(result.ok());
  EXPECT_GT(result->bytes_mapped, 0U);
  EXPECT_EQ(result->bytes_copied, 0U);
  ASSERT_TRUE(restored->truncate(101).ok());
  ASSERT_TRUE(fresh->prefill(ids).ok());
  ASSERT_TRUE(fresh->truncate(101).ok());
  const auto other = random_ids(150, model->config().vocab, 9), more = random_ids(5, model->config().vocab, 8);
  EXPECT_EQ(go_on(*restored, more, other).back(), go_on(*fresh, more, other).back());
  EXPECT_TRUE(std::ranges::equal(restored->logits(), fresh->logits()));
  EXPECT_EQ(test::file_bytes(path), before);
}

}  // namespace
}  // namespace longkv
