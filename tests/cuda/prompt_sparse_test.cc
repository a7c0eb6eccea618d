// Sparse reading of prompts: patterns on the card against the CPU's, and whole models.
#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "base/threads.h"
#include "cuda/card.h"
#include "cuda/card_session.h"
#include "cuda/card_sparse.h"
#include "engine/likelihood.h"
#include "engine/session.h"
#include "prefill/attention.h"
#include "prefill/sparse.h"
#include "support/paths.h"

namespace longkv {
namespace {

using test::OnCard;

struct Shape {
  int heads, kv_heads, dim;
  int64_t rows, first;
};

PrefillSpec spec_of(const std::string& stage) {
  auto recipe = parse_recipe(stage);
  EXPECT_TRUE(recipe.ok()) << stage;
  return recipe.value().prefill;
}

// One chunk of random rows through estimate, choice and attention, on the card and on the CPU. Queries are large, so
// that few rows have most of the mass. A choice between nearly equal scores may differ, as the card's queries and means
// are halves: such blocks of queries are counted.
void compare(const std::string& stage, const Shape& c, double most_blocks, double most_pairs) {
  SCOPED_TRACE(testing::Message() << stage << ": " << c.heads << "/" << c.kv_heads << " x " << c.dim << ", rows "
                                  << c.first << " to " << c.rows);
  static ThreadPool pool(default_threads());
  // Never destroyed: the driver goes before static objects do.
  static auto& memory = *new CardMemory(0);
  static auto& gemm = *CardGemm::create(memory).value().release();
  const PrefillSpec spec = spec_of(stage);
  const int64_t capacity = (c.rows + 15) / 16 * 16, n = c.rows - c.first, width = c.heads * c.dim;
  const OnCard kv_memory(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, capacity));
  const card::CardKv kv = card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, kv_memory.data());
  ASSERT_DONE(card::fill_rows(kv, c.rows, 31, nullptr));
  const auto queries = test::to_halves(test::normal_floats(n * width, 5, 2.5f));
  const OnCard q = OnCard::of(queries), out(n * width * 2);

  ModelConfig config;
  config.layers = 2;
  config.heads = c.heads;
  config.kv_heads = c.kv_heads;
  config.head_dim_k = config.head_dim_v = c.dim;
  const auto scale = float(1 / std::sqrt(double(c.dim)));
  auto made = CardSparse::create(memory, config, spec, c.rows + 100, n + 37);
  ASSERT_TRUE(made.ok()) << made.status().message();
  CardSparse& sparse = **made;
  ASSERT_TRUE(sparse.applies(1, c.rows));
  ASSERT_DONE(sparse.begin_prompt(nullptr));
  ASSERT_DONE(sparse.begin_layer(1, kv, c.first, nullptr));
  const card::AttendArgs a{q.as<card::half_t>(), c.heads, kv, scale, 0.0f, 0};
  ASSERT_DONE(sparse.attend(1, a, c.first, n, c.rows, gemm, out.as<card::half_t>(), nullptr));
  const PrefillPairs pairs = sparse.pairs(nullptr).value();
  const auto got = out.read<uint16_t>(n * width);
  const auto rows = kv_memory.read<uint16_t>(2 * c.kv_heads * capacity * c.dim);

  std::vector<float> q_floats, want(size_t(n * width));
  for (uint16_t x : queries) q_floats.push_back(test::half_float(x));
  std::vector<KvHeadView> views;
  for (int h = 0; h < c.kv_heads; ++h) {
    KvHeadView view;
    view.k_type = view.v_type = KvType::kF16;
    view.dim_k = view.dim_v = c.dim;
    view.k = reinterpret_cast<const uint8_t*>(&rows[size_t(h * capacity * c.dim)]);
    view.v = reinterpret_cast<const uint8_t*>(&rows[size_t((c.kv_heads + h) * capacity * c.dim)]);
    view.k_stride = view.v_stride = c.dim * 2;
    view.rows = c.rows;
    views.push_back(view);
  }
  PrefillAttendArgs args;
  args.q = q_floats.data();
  args.tokens = n;
  args.first_position = c.first;
  args.heads = views;
  args.group_size = c.heads / c.kv_heads;
  args.params = {scale, 0.0f};
  args.out = want.data();
  const auto cpu = SparsePrefill::create(spec, {2, c.kv_heads, args.group_size, c.dim, c.dim, {}}).value();
  PrefillAttention attention(pool);
  const PrefillPairs cpu_pairs = cpu->run(args, 1, c.rows, attention, pool);

  EXPECT_EQ(pairs.causal, cpu_pairs.causal);
  int64_t blocks = 0, differ = 0;
  double worst = 0;
  for (int h = 0; h < c.heads; ++h) {
    for (int64_t t = 0; t < n;) {
      const int64_t end = std::min(n, (c.first + t) / 64 * 64 + 64 - c.first);
      double largest = 0;
      for (; t < end; ++t) {
        double error = 0, norm = 0;
        for (int i = 0; i < c.dim; ++i) {
          const double x = test::half_float(got[size_t(t * width + h * c.dim + i)]);
          const double y = want[size_t(t * width + h * c.dim + i)];
          error += (x - y) * (x - y);
          norm += y * y;
        }
        largest = std::max(largest, norm > 0 && error == error ? std::sqrt(error / norm) : 1e9);
      }
      ++blocks;
      differ += largest > 0.01;
      worst = std::max(worst, largest);
    }
  }
  const double pairs_off = double(pairs.attended - cpu_pairs.attended) / double(cpu_pairs.attended);
  std::printf("  %-60s %d/%d x %d, %lld+%lld: %lld of %lld blocks differ, worst %.3f; pairs %.4f of all, %+.5f\n",
              stage.c_str(), c.heads, c.kv_heads, c.dim, static_cast<long long>(c.first), static_cast<long long>(n),
              static_cast<long long>(differ), static_cast<long long>(blocks), worst,
              double(cpu_pairs.attended) / double(cpu_pairs.causal), pairs_off);
  EXPECT_LE(double(differ), most_blocks * double(blocks));
  EXPECT_LE(std::fabs(pairs_off), most_pairs);
}

const Shape kShapes[] = {{4, 2, 64, 700, 0},   {3, 1, 128, 901, 333},   {6, 2, 128, 2049, 1023},
                         {3, 3, 96, 640, 256}, {4, 1, 256, 523, 130},   {2, 1, 64, 128, 0},
                         {2, 1, 64, 129, 64},  {8, 2, 128, 4100, 3000}, {2, 2, 64, 1500, 1499}};

TEST(CardPromptSparse, WindowsAsOnTheCpu) {
  LONGKV_NEED_CARD();
  for (const Shape& c : kShapes)
    compare("prefill=a_shape(sink=70,window=200,threshold=0,last=33,dense_layers=0)", c, 0, 0);
}

TEST(CardPromptSparse, LinesAsOnTheCpu) {
  LONGKV_NEED_CARD();
  for (const Shape& c : kShapes)
    compare("prefill=vertical_slash(columns=60,diagonals=120,threshold=0,last=33,dense_layers=0)", c, 0.02, 0.002);
}

TEST(CardPromptSparse, BlocksAsOnTheCpu) {
  LONGKV_NEED_CARD();
  for (const Shape& c : kShapes)
    compare("prefill=block_sparse(blocks=5,threshold=0,last=33,dense_layers=0)", c, 0.02, 0.002);
}

TEST(CardPromptSparse, SharesAsOnTheCpu) {
  LONGKV_NEED_CARD();
  for (const Shape& c : kShapes) {
    for (const char* more : {"tau=60%,sink=128,min_blocks=1,stride=16", "tau=80%,sink=0,min_blocks=2,stride=8",
                             "tau=50%,sink=200,min_blocks=3,stride=16,heads=kv"}) {
      compare(std::string("prefill=xattention(threshold=0,last=33,dense_layers=0,") + more + ")", c, 0.02, 0.002);
    }
  }
}

// Whole models: a pattern that leaves nothing out is dense reading; others read as on the CPU, and on the card prompts
// whose rows lie in memory or are quantised as well.
TEST(CardPromptSparse, ModelsReadAsOnTheCpu) {
  LONGKV_NEED_CARD();
  ThreadPool pool(default_threads());
  const auto model = LoadedModel::load(test::repo_model("needle-10m-128k-f16.gguf")).value();
  const auto card = CardModel::load(model, {}).value();
  std::string text;
  while (text.size() < 6000)
    text += "The grass is green. The sky is blue. " + std::to_string(text.size()) + " is a number. ";
  std::vector<int32_t> ids = {256};
  for (unsigned char c : text) ids.push_back(c);
  const auto read = [&](const std::string& recipe, bool on_card, bool hybrid = false, bool card_kv = true) {
    SessionOptions o;
    o.context = 8192;
    o.recipe = parse_recipe(recipe).value();
    o.products = ProductType::kF32;
    o.chunk = 4096;
    if (on_card) o.card = card;
    o.card_hybrid = hybrid;
    o.card_kv = card_kv;
    auto made = Session::create(model, o, pool);
    EXPECT_TRUE(made.ok()) << recipe << ": " << made.status().message();
    if (!made.ok()) return std::vector<float>(size_t(model->config().vocab), 0.0f);
    EXPECT_TRUE((*made)->reads_on_card() == on_card) << recipe;
    EXPECT_DONE((*made)->prefill(ids));
    const auto logits = (*made)->logits();
    return std::vector<float>(logits.data(), logits.data() + model->config().vocab);
  };
  const auto kl = [&](const std::vector<float>& a, const std::vector<float>& b) {
    return kl_divergence(a.data(), b.data(), model->config().vocab);
  };
  const auto dense = read("full", true);
  const std::string rest = "threshold=1024,last=64,dense_layers=1)";
  for (const char* all : {"a_shape(window=100000,", "vertical_slash(columns=8192,diagonals=8192,",
                          "block_sparse(blocks=1000,", "xattention(tau=100%,"}) {
    const double off = kl(dense, read("prefill=" + (all + rest), true));
    std::printf("  %-50s KL against dense %.1e\n", all, off);
    EXPECT_LT(off, 1e-4) << all;
  }
  const std::string file = test::repo_model("needle-10m-128k-minference.json");
  for (const std::string& few :
       {std::string("a_shape(sink=64,window=500,"), std::string("vertical_slash(columns=200,diagonals=300,"),
        std::string("block_sparse(blocks=24,"), std::string("xattention(tau=70%,min_blocks=2,"),
        std::string("xattention(tau=70%,min_blocks=2,heads=kv,stride=8,"), "minference(file=" + file + ","}) {
    const std::string recipe = "prefill=" + (few + rest);
    const auto cpu = read(recipe, false), sparse = read(recipe, true), quantised = read(recipe + " + store=q8_0", true),
               hybrid = read(recipe + " + index=minmax + select=topk(budget=4096)", true, true),
               hosted = read(recipe, true, false, false);
    std::printf("  %-60.60s KL against the CPU's %.1e, dense %.1e, q8_0 %.1e, hybrid %.1e, rows in memory %.1e\n",
                few.c_str(), kl(cpu, sparse), kl(dense, sparse), kl(sparse, quantised), kl(sparse, hybrid),
                kl(sparse, hosted));
    EXPECT_GT(kl(dense, sparse), 0.0) << few;
    EXPECT_LT(kl(cpu, sparse), 1e-5) << few;
    EXPECT_LT(kl(sparse, quantised), 1e-4) << few;
    EXPECT_LT(kl(sparse, hybrid), 1e-4) << few;
    EXPECT_LT(kl(sparse, hosted), 1e-4) << few;
  }
}

}  // namespace
}  // namespace longkv
