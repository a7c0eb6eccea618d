// Learning end to end on a tiny model: same seed same mask, a stopped run goes on where it was, and what is learned
// loses less than chance.
#include "train/trainer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "support/paths.h"

namespace longkv {
namespace {

TrainOptions small_options() {
  TrainOptions o;
  o.sink = 32;
  o.window = 128;
  o.shortest = 448;
  o.longest = 640;
  o.lengths = 3;
  o.steps = 2;
  o.refine_steps = 2;
  o.allocation = Allocation::kThreshold;
  o.lessons.questions = 2;
  o.held_out = 1;
  return o;
}

struct Scene {
  ThreadPool pool;
  std::shared_ptr<const LoadedModel> model;
  Tokenizer tokenizer;
  explicit Scene(int threads)
      : pool(threads),
        model(*LoadedModel::load(test::repo_model("needle-10m-128k-f16.gguf"))),
        tokenizer(*Tokenizer::from_metadata(model->file().metadata())) {}
  std::unique_ptr<Trainer> trainer(const TrainOptions& o) {
    auto t = Trainer::create(model, tokenizer, o, pool);
    EXPECT_TRUE(t.ok()) << t.status().message();
    return std::move(t).value();
  }
};

TEST(Trainer, TheSameSeedLearnsTheSameMaskOnAnyThreads) {
  Scene one(1), two(2);
  const auto a = one.trainer(small_options())->run("", {}, nullptr);
  const auto b = two.trainer(small_options())->run("", {}, nullptr);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->mask.heads, b->mask.heads);
  EXPECT_EQ(a->counts, b->counts);
}

TEST(Trainer, AStoppedRunGoesOnWhereItWas) {
  Scene scene(2);
  TrainOptions directions = small_options();
  directions.learned = Learned::kDirections;
  directions.steps = 0;
  directions.allocation = Allocation::kBytes;
  directions.loss = TrainLoss::kDivergence;
  for (const auto& [options, stop_at] : {std::pair{small_options(), 3}, {directions, 1}}) {
    const auto whole = scene.trainer(options)->run("", {}, nullptr);
    ASSERT_TRUE(whole.ok()) << whole.status().message();
    const std::string checkpoint =
        test::temp_path("train" + std::to_string(stop_at) + std::to_string(int(options.learned)));
    std::atomic<bool> cancel = false;
    int64_t steps = 0;
    const auto stopped = scene.trainer(options)->run(
        checkpoint, [&](const TrainProgress&) { cancel = ++steps >= stop_at; }, &cancel);
    ASSERT_EQ(stopped.status().code(), Code::kCancelled);
    const auto resumed = scene.trainer(options)->run(checkpoint, {}, nullptr);
    ASSERT_TRUE(resumed.ok()) << resumed.status().message();
    EXPECT_EQ(resumed->mask.heads, whole->mask.heads) << stop_at;
    // Another run's state is not taken for one's own, and a damaged one not for a good one.
    TrainOptions other = options;
    other.lambda = 0.5;
    EXPECT_EQ(scene.trainer(other)->run(checkpoint, {}, nullptr).status().code(), Code::kInvalidArgument);
    std::filesystem::resize_file(checkpoint, std::filesystem::file_size(checkpoint) / 2);
    EXPECT_FALSE(scene.trainer(options)->run(checkpoint, {}, nullptr).ok());
  }
}

TEST(Trainer, LearnedChannelsLoseLessThanTheFirstOnes) {
  Scene scene(2);
  TrainOptions o = small_options();
  o.steps = 9;
  o.refine_steps = 6;
  o.lessons.questions = 4;
  const auto learned = scene.trainer(o)->run("", {}, nullptr);
  ASSERT_TRUE(learned.ok()) << learned.status().message();
  o.steps = o.refine_steps = 0;  // the quadratic's order alone
  o.allocation = Allocation::kBytes;
  const auto one_shot = scene.trainer(o)->run("", {}, nullptr);
  ASSERT_TRUE(one_shot.ok()) << one_shot.status().message();
  EXPECT_LE(learned->held_out, learned->held_out_start);
  EXPECT_LT(learned->held_out, 0.1);
  EXPECT_LT(one_shot->held_out, 0.1);
  EXPECT_GT(one_shot->held_out, 0.0);
  o.learned = Learned::kDirections;
  const auto directions = scene.trainer(o)->run("", {}, nullptr);
  ASSERT_TRUE(directions.ok()) << directions.status().message();
  // Spread over positions, directions fit these few lessons about as well as channels do.
  EXPECT_LT(directions->held_out, 2 * one_shot->held_out);
  o.refine_steps = 12;
  o.refine_rate = 0.01;
  const auto moved = scene.trainer(o)->run("", {}, nullptr);
  ASSERT_TRUE(moved.ok()) << moved.status().message();
  EXPECT_EQ(moved->counts, directions->counts);
  EXPECT_LT(moved->held_out, directions->held_out);
  EXPECT_EQ(moved->held_out_start, directions->held_out);
}

TEST(Trainer, BudgetsAreKept) {
  Scene scene(2);
  TrainOptions o = small_options();
  o.steps = o.refine_steps = 0;
  o.documents = 2;
  o.ratio = 0.75;
  o.allocation = Allocation::kChannels;
  const auto channels = scene.trainer(o);
  const auto by_channels = channels->run("", {}, nullptr);
  ASSERT_TRUE(by_channels.ok()) << by_channels.status().message();
  EXPECT_LE(share_kept(channels->shape(), by_channels->counts), 0.25);
  EXPECT_GT(share_kept(channels->shape(), by_channels->counts), 0.15);
  o.allocation = Allocation::kBytes;
  o.bytes = 0.4;
  const auto bytes = scene.trainer(o);
  const auto by_bytes = bytes->run("", {}, nullptr);
  ASSERT_TRUE(by_bytes.ok()) << by_bytes.status().message();
  EXPECT_LE(share_of_bytes(bytes->shape(), by_bytes->counts), 0.4);
  EXPECT_GT(share_of_bytes(bytes->shape(), by_bytes->counts), 0.25);
}

// Heads that DuoAttention's gates let stream keep no old rows, and what is saved goes to the others.
TEST(Trainer, StreamingHeadsKeepNothing) {
  Scene scene(2);
  TrainOptions o = small_options();
  o.learned = Learned::kDirections;
  o.steps = o.refine_steps = 0;
  o.allocation = Allocation::kBytes;
  for (int64_t h = 0; h < 12; ++h) o.streaming.push_back(h % 2 == 0);
  const auto mask = scene.trainer(o)->run("", {}, nullptr);
  ASSERT_TRUE(mask.ok()) << mask.status().message();
  int64_t kept = 0;
  for (size_t h = 0; h < 12; ++h) {
    if (h % 2 == 0) {
      EXPECT_EQ(mask->counts[h], 0);
      EXPECT_EQ(mask->mask.heads[h].removed, RemovedAs::kDrop);
    }
    kept += mask->counts[h];
  }
  EXPECT_GT(kept, 0);
  o.streaming.pop_back();
  EXPECT_FALSE(Trainer::create(scene.model, scene.tokenizer, o, scene.pool).ok());
}

TEST(Trainer, RefusesWhatCannotBeLearned) {
  Scene scene(1);
  const auto code = [&](const TrainOptions& o) {
    return Trainer::create(scene.model, scene.tokenizer, o, scene.pool).status().code();
  };
  TrainOptions o = small_options();
  o.shortest = 100;
  EXPECT_EQ(code(o), Code::kInvalidArgument);
  o = small_options();
  o.align = 7;
  EXPECT_EQ(code(o), Code::kInvalidArgument);
  o = small_options();
  o.bytes = 0.5;  // by threshold
  EXPECT_EQ(code(o), Code::kInvalidArgument);
  o = small_options();
  o.ratio = 1.0;
  EXPECT_EQ(code(o), Code::kInvalidArgument);
  o = small_options();
  o.steps = 0;  // a threshold over scales that nothing has learned
  EXPECT_EQ(code(o), Code::kInvalidArgument);
  o = small_options();
  o.learned = Learned::kDirections;  // they have no first stage
  EXPECT_EQ(code(o), Code::kInvalidArgument);
  o = small_options();
  o.lessons.generated = false;  // nothing to learn from
  EXPECT_EQ(code(o), Code::kInvalidArgument);
  o = small_options();
  o.rate = NAN;
  EXPECT_EQ(code(o), Code::kInvalidArgument);
}

TEST(Trainer, GatesFallWhereOldRowsDoNotMatter) {
  Scene scene(2);
  TrainOptions o = small_options();
  o.learned = Learned::kGates;
  o.steps = 12;
  o.lambda = 0.05;
  o.rate = 0.05;
  const auto gates = scene.trainer(o)->run("", {}, nullptr);
  ASSERT_TRUE(gates.ok()) << gates.status().message();
  ASSERT_EQ(gates->gates.size(), 12u);
  float low = 1, high = 0;
  for (float g : gates->gates) low = std::min(low, g), high = std::max(high, g);
  EXPECT_LT(low, 0.9f);
  EXPECT_GT(high, low);
}

}  // namespace
}  // namespace longkv
