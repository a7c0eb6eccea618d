// What surrounds kernels: calls with nothing to do, recordings that fail, cards that are only looked at, and where a
// block's largest value comes from.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>

#include "cuda/card.h"
#include "cuda/chunk.h"
#include "cuda/gemm.h"
#include "cuda/old.h"
#include "cuda/prompt_blocks.h"

namespace longkv {
namespace {

using test::OnCard;

// Without a card as well: nothing is launched.
TEST(CardLaunch, NoRowsAreNoWork) {
  const card::CardKv none = card::place_kv(KvType::kF16, 2, 64, 16, nullptr);
  EXPECT_DONE(card::fill_rows(none, 0, 1, nullptr));
  EXPECT_DONE(card::decode_rows(none, 5, 0, none, nullptr));
  EXPECT_DONE(card::pool_keys(none, 64, 0, 4, nullptr, nullptr));
  EXPECT_DONE(card::pool_queries(nullptr, 2, 64, 64, 0, nullptr, nullptr));
}

TEST(CardLaunch, EncodedRowsTakeTilesAsTheyAre) {
  const card::AttendOldArgs a{nullptr, nullptr, 4, {KvType::kF16, 2, 64}};
  const uint32_t mark = 1;
  card::TileList list;
  list.marks = &mark;
  EXPECT_NE(card::attend_old(a, list, {}, nullptr).message().find("marked or placed"), std::string::npos);
  list.marks = nullptr;
  list.placed = true;
  EXPECT_NE(card::attend_old(a, list, {}, nullptr).message().find("marked or placed"), std::string::npos);
}

// What cuBLASLt is promised of operands.
TEST(CardLaunch, OperandsOfProductsLieAtMultiplesOf) {
  const auto at = [](int64_t place) { return reinterpret_cast<const void*>(place); };
  const auto out = [](int64_t place) { return reinterpret_cast<const float*>(place); };
  CardProduct p{4, 8, 64, false, true, 64, 64, 8};
  p.halves = true;
  EXPECT_EQ(CardGemm::alignment(p, at(4096), at(8192), out(512)), 256);
  EXPECT_EQ(CardGemm::alignment(p, at(4096 + 3 * 64 * 2), at(8192), out(512)), 128);
  EXPECT_EQ(CardGemm::alignment(p, at(4096), at(8192 + 3 * 96 * 2), out(512)), 64);
  EXPECT_EQ(CardGemm::alignment(p, at(4096), at(8192), out(516)), 4);
  p.a_step = 3 * 64;
  EXPECT_EQ(CardGemm::alignment(p, at(4096), at(8192), out(512)), 256);
  p.batch = 2;
  EXPECT_EQ(CardGemm::alignment(p, at(4096), at(8192), out(512)), 128);
}

TEST(CardLaunch, ARecordingThatFailsLeavesNothingBehind) {
  LONGKV_NEED_CARD();
  const auto stream = std::move(CardStream::create()).value();
  const OnCard memory(16);
  const auto plain = [&] { return card::set_position(memory.as<int64_t>(), 5, stream.get()); };
  // A wait ends a recording; what failed says so.
  const auto waits = [&] {
    const Status queued = plain();
    return queued.ok() ? stream.wait("a wait") : queued;
  };
  EXPECT_FALSE(capture_work(stream.get(), waits).ok());
  EXPECT_DONE(plain());
  EXPECT_DONE(stream.wait("a launch"));
  // A wait whose failure nobody passes on.
  EXPECT_FALSE(capture_work(stream.get(), [&] {
                 (void)waits();
                 return Status();
               }).ok());
  EXPECT_DONE(plain());
  const Status own(Code::kInvalidArgument, "of its own");
  EXPECT_EQ(capture_work(stream.get(), [&] { return own; }).status().message(), "of its own");
  EXPECT_DONE(plain());
  const auto step = capture_work(
      stream.get(), [&] { return card::set_position(memory.as<int64_t>(), (int64_t(1) << 40) + 3, stream.get()); });
  ASSERT_TRUE(step.ok()) << step.status().message();
  EXPECT_DONE(stream.wait("a launch"));
  EXPECT_EQ(memory.read<int64_t>(1)[0], 5);
  OnCard::check(cudaGraphLaunch(*step, stream.get()));
  EXPECT_DONE(stream.wait("a graph"));
  EXPECT_EQ(memory.read<int64_t>(1)[0], (int64_t(1) << 40) + 3);
  OnCard::check(cudaGraphExecDestroy(*step));
}

// Cards that have what CUDA sets up on one, by the driver itself.
std::vector<int> open_cards() {
  std::vector<int> open;
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return open;
  const auto start = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  const auto state = reinterpret_cast<int (*)(int, unsigned*, int*)>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
  int cards = 0;
  if (start == nullptr || count == nullptr || state == nullptr || start(0) != 0 || count(&cards) != 0) return open;
  for (int i = 0; i < cards; ++i) {
    unsigned flags = 0;
    int active = 0;
    if (state(i, &flags, &active) == 0 && active != 0) open.push_back(i);
  }
  return open;
}

TEST(CardLaunch, LookingAtCardsOpensNone) {
  const std::vector<int> before = open_cards();
  const auto cards = cuda_cards();
  EXPECT_EQ(open_cards(), before);
  if (!cards.ok()) GTEST_SKIP() << cards.status().message();
  const auto opened = open_card(cards->front().index);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_GT(opened->free_bytes, 0);
  for (const int card : open_cards()) {
    EXPECT_TRUE(card == cards->front().index || std::find(before.begin(), before.end(), card) != before.end()) << card;
  }
  EXPECT_EQ(open_card(1 << 20).status().code(), Code::kUnsupported);
}

// Scores so low that their powers are zeros beside one of 0, of two pieces of rows; the first one's are not visible.
TEST(CardLaunch, SoftmaxOfLowScores) {
  LONGKV_NEED_CARD();
  card::ChunkQueries q;
  q.kv_heads = 2, q.group = 3, q.tokens = 5;
  q.first = 140;
  q.window = 70;  // rows 71 and later
  q.dim_k = q.dim_v = 64;
  const int64_t n = 64, all = q.all();
  std::vector<float> out(size_t(all * q.dim_v), 7.0f);
  const OnCard on_out = OnCard::of(out), top(all * 4), sum(all * 4);
  std::vector<std::vector<double>> seen(static_cast<size_t>(all));
  for (int64_t row : {0, 64, 128}) {
    std::vector<float> scores = test::normal_floats(all * n, uint32_t(row + 1));
    for (float& x : scores) x -= 120.0f;
    const OnCard s = OnCard::of(scores);
    ASSERT_DONE(card::chunk_softmax(q, {s.as<float>(), n, row, nullptr}, row == 0, top.as<float>(), sum.as<float>(),
                                    on_out.as<float>(), nullptr));
    for (int64_t i = 0; i < all; ++i) {
      const int64_t position = q.first + i % q.of_head() / q.group;
      for (int64_t j = 0; j < n; ++j)
        if (row + j <= position && row + j > position - q.window) seen[size_t(i)].push_back(scores[size_t(i * n + j)]);
    }
    const auto weights = s.read<float>(all * n), largest = top.read<float>(all), total = sum.read<float>(all);
    for (int64_t i = 0; i < all; ++i) {
      const auto& x = seen[size_t(i)];
      if (x.empty()) {
        EXPECT_EQ(total[size_t(i)], 0.0f);
        continue;
      }
      const double most = *std::max_element(x.begin(), x.end());
      double want = 0;
      for (const double v : x) want += std::exp(v - most);
      EXPECT_EQ(double(largest[size_t(i)]), most);
      EXPECT_NEAR(total[size_t(i)], want, 1e-5 * want);
      float highest = 0;
      for (int64_t j = 0; j < n; ++j) highest = std::max(highest, weights[size_t(i * n + j)]);
      EXPECT_GT(highest, 0.0f);
    }
  }
  ASSERT_DONE(card::chunk_finish(q, top.as<float>(), sum.as<float>(), on_out.as<float>(), nullptr));
  const auto lse = top.read<float>(all);
  const auto rest = on_out.read<float>(all * q.dim_v);
  for (int64_t i = 0; i < all; ++i) {
    const auto& x = seen[size_t(i)];
    EXPECT_EQ(int64_t(x.size()), q.window);
    const double most = *std::max_element(x.begin(), x.end());
    double want = 0;
    for (const double v : x) want += std::exp(v - most);
    EXPECT_NEAR(lse[size_t(i)], most + std::log(want), 120 * 0x1p-22);
    EXPECT_EQ(rest[size_t(i * q.dim_v)], 0.0f);  // nothing was added to it
  }
}

}  // namespace
}  // namespace longkv
