// The scheduler without sockets: the same answer alone and beside others, reuse of rows, limits, cancellation.
#include "server/scheduler.h"

#include <gtest/gtest.h>

#include "harness.h"

namespace longkv::server {
namespace {

using std::chrono::milliseconds;

struct Outcome {
  std::vector<int32_t> ids;
  std::string text;
  std::optional<Finished> finished;
  std::optional<Status> error;
};

Outcome wait_for(EventQueue& events, double seconds = 60) {
  Outcome out;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (!out.finished && !out.error && Clock::now() < end) {
    for (const Event& event : events.take(milliseconds(100))) {
      if (const auto* piece = std::get_if<TextPiece>(&event)) {
        out.ids.insert(out.ids.end(), piece->ids.begin(), piece->ids.end());
        out.text += piece->text;
      } else if (const auto* finished = std::get_if<Finished>(&event)) {
        out.finished = *finished;
      } else if (const auto* error = std::get_if<Status>(&event)) {
        out.error = *error;
      }
    }
  }
  return out;
}

void wait_for_text(EventQueue& events) {
  for (bool came = false; !came;) {
    for (const Event& event : events.take(milliseconds(100))) came |= !std::holds_alternative<PromptProgress>(event);
  }
}

class SchedulerTest : public ::testing::Test {
 protected:
  // SmolLM2 where it was fetched: long prompts take long enough to be interrupted.
  void start(int slots, size_t queue = 16, bool real = false, const std::string& kv = "full") {
    set_log_level(LogLevel::kQuiet);
    std::string path = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
    if (!real) path = test::tiny_chat_model().write("scheduler.gguf");
    auto loaded = LoadedModel::load(path);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    model_ = *loaded;
    tokenizer_.emplace(*Tokenizer::from_metadata(model_->file().metadata()));
    SchedulerOptions o;
    o.slots = slots;
    o.queue = queue;
    o.session.context = real ? 4096 : 512;
    // Rows of this model's floating-point weights are reused to multiples of the chunk.
    o.session.chunk = real ? 256 : 32;
    o.session.recipe = *parse_recipe(kv);
    auto made = Scheduler::create(model_, *tokenizer_, o, pool_);
    ASSERT_TRUE(made.ok()) << made.status().message();
    scheduler_ = std::move(made).value();
  }

  GenerateRequest request(int64_t prompt, int64_t answer, uint32_t seed = 1) {
    return random_request(prompt, answer, seed);
  }

  Outcome run(GenerateRequest r) { return wait_for(*scheduler_->submit(std::move(r))); }

  ThreadPool pool_{2};
  std::shared_ptr<const LoadedModel> model_;
  std::optional<Tokenizer> tokenizer_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(SchedulerTest, TheSameAnswerAloneAndBesideOthers) {
  start(1);
  std::vector<Outcome> alone;
  for (uint32_t i = 0; i < 6; ++i) {
    GenerateRequest r = request(30 + 60 * i, 20 + 5 * i, i);
    r.reuse = Reuse::kNone;
    r.logprobs = 0;
    alone.push_back(run(r));
    ASSERT_TRUE(alone.back().finished);
    EXPECT_EQ(alone.back().ids.size(), size_t(20 + 5 * i));
  }
  scheduler_.reset();
  for (const int slots : {2, 6}) {
    start(slots);
    std::vector<std::shared_ptr<EventQueue>> queues;
    for (uint32_t i = 0; i < 6; ++i) queues.push_back(scheduler_->submit(request(30 + 60 * i, 20 + 5 * i, i)));
    for (uint32_t i = 0; i < 6; ++i) {
      const Outcome o = wait_for(*queues[i]);
      EXPECT_EQ(o.ids, alone[i].ids) << slots << " slots, request " << i;
      EXPECT_EQ(o.text, alone[i].text);
    }
    scheduler_.reset();
  }
}

TEST_F(SchedulerTest, ReuseGivesTheSameAnswerAndCountsItsTokens) {
  start(1);
  GenerateRequest first = request(300, 15);
  const Outcome whole = run(first);
  ASSERT_TRUE(whole.finished);
  EXPECT_EQ(whole.finished->timings.cached_tokens, 0);
  const Outcome again = run(first);
  EXPECT_EQ(again.ids, whole.ids);
  EXPECT_EQ(again.finished->timings.cached_tokens, 288) << "299 in steps of 32";

  // Another end of the same text, against a reading of everything; then one that shares only 100 tokens.
  for (const int64_t shared : {250, 100}) {
    GenerateRequest other = first;
    other.ids.resize(size_t(shared));
    const auto tail = request(77, 1, 9).ids;
    other.ids.insert(other.ids.end(), tail.begin(), tail.end());
    const Outcome hit = run(other);
    EXPECT_EQ(hit.finished->timings.cached_tokens, shared / 32 * 32);
    other.reuse = Reuse::kNone;
    const Outcome miss = run(other);
    EXPECT_EQ(miss.finished->timings.cached_tokens, 0);
    EXPECT_EQ(hit.ids, miss.ids) << shared;
    other.reuse = Reuse::kExact;
    run(first);
  }
  // Rows of decoded tokens are reused only when asked for.
  GenerateRequest turn = first;
  turn.ids.insert(turn.ids.end(), whole.ids.begin(), whole.ids.end());
  turn.ids.push_back('x');
  EXPECT_EQ(run(turn).finished->timings.cached_tokens, 288);
  run(first);
  turn.reuse = Reuse::kAny;
  EXPECT_EQ(run(turn).finished->timings.cached_tokens, 314) << "all that was fed: the last token of an answer is not";
  // Another salt shares nothing.
  first.salt = "other";
  EXPECT_EQ(run(first).finished->timings.cached_tokens, 0);
}

TEST_F(SchedulerTest, RecipesWhoseRowsDependOnThePromptAreReadAnew) {
  start(1, 16, false, "snapkv:budget=64");
  GenerateRequest r = request(200, 5);
  const Outcome first = run(r);
  const Outcome again = run(r);
  EXPECT_EQ(again.finished->timings.cached_tokens, 0);
  EXPECT_EQ(again.ids, first.ids);
}

TEST_F(SchedulerTest, TheSlotThatHoldsTheTextIsTaken) {
  start(3);
  const GenerateRequest book = request(400, 3, 1);
  const int slot = run(book).finished->timings.slot;
  for (uint32_t i = 10; i < 16; ++i) EXPECT_NE(run(request(40, 3, i)).finished->timings.slot, slot) << "short tasks";
  const Outcome again = run(book);
  EXPECT_EQ(again.finished->timings.slot, slot);
  EXPECT_EQ(again.finished->timings.cached_tokens, 384);
}

TEST_F(SchedulerTest, ALimitOfWaitingRequests) {
  start(1, 2);
  std::vector<std::shared_ptr<EventQueue>> queues;
  for (uint32_t i = 0; i < 8; ++i) queues.push_back(scheduler_->submit(request(300, 150, i)));
  int refused = 0, finished = 0;
  for (const auto& q : queues) refused += q == nullptr;
  EXPECT_GE(refused, 4) << "one in the slot, two wait, and perhaps one that began at once";
  EXPECT_LE(refused, 5);
  for (const auto& q : queues) finished += q != nullptr && wait_for(*q).finished;
  EXPECT_EQ(finished, 8 - refused);
  EXPECT_EQ(scheduler_->counters().refused, refused);
}

TEST_F(SchedulerTest, CancelledWhereverItIs) {
  if (test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf").empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  start(1, 16, true);
  // While reading, with one waiting behind it that is cancelled too.
  auto reading = scheduler_->submit(request(3900, 10));
  auto waiting = scheduler_->submit(request(3900, 10, 2));
  // Until a few chunks have passed.
  for (int64_t done = 0; done < 600;) {
    for (const Event& e : reading->take(milliseconds(100))) {
      if (const auto* progress = std::get_if<PromptProgress>(&e)) done = progress->done;
    }
  }
  waiting->cancel();
  reading->cancel();
  auto begin = Clock::now();
  EXPECT_EQ(wait_for(*reading).error->code(), Code::kCancelled);
  EXPECT_EQ(wait_for(*waiting).error->code(), Code::kCancelled);
  EXPECT_LT(ms_between(begin, Clock::now()), 1000);
  // What was read of it serves the next.
  const Outcome next = run(request(3900, 1));
  EXPECT_GT(next.finished->timings.cached_tokens, 0);
  // While answering.
  auto answering = scheduler_->submit(request(40, 4000, 3));
  wait_for_text(*answering);
  begin = Clock::now();
  answering->cancel();
  EXPECT_EQ(wait_for(*answering).error->code(), Code::kCancelled);
  EXPECT_LT(ms_between(begin, Clock::now()), 1000);
  // A time limit.
  GenerateRequest late = request(40, 4000, 4);
  late.deadline = Clock::now() + milliseconds(3000);
  const Outcome timed_out = run(late);
  ASSERT_TRUE(timed_out.error);
  EXPECT_NE(timed_out.error->message().find("time limit"), std::string::npos);
  EXPECT_FALSE(timed_out.ids.empty());
  Counters c;
  for (int i = 0; i < 100 && (c = scheduler_->counters()).timed_out == 0; ++i)
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(c.cancelled, 3);
  EXPECT_EQ(c.timed_out, 1);
  EXPECT_EQ(c.busy, 0);
}

TEST_F(SchedulerTest, AnAnswerGoesOnWhileAPromptIsRead) {
  if (test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf").empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  start(2, 16, true);
  const Outcome alone = run(request(40, 60, 5));
  // Long enough to outlast the prompt beside it.
  GenerateRequest talk = request(40, 400, 5);
  auto talking = scheduler_->submit(talk);
  wait_for_text(*talking);
  auto reading = scheduler_->submit(request(2000, 1, 6));
  std::vector<double> gaps;
  auto last = Clock::now();
  std::optional<Finished> read;
  bool talked = false;
  while (!read) {
    for (const Event& e : talking->take(milliseconds(50))) {
      talked |= std::holds_alternative<Finished>(e);
      const auto* piece = std::get_if<TextPiece>(&e);
      if (piece == nullptr || piece->ids.empty()) continue;
      // A character may take several tokens, which come as one piece.
      gaps.push_back(ms_between(last, Clock::now()) / double(piece->ids.size()));
      last = Clock::now();
    }
    for (const Event& e : reading->take(milliseconds(0))) {
      if (const auto* f = std::get_if<Finished>(&e)) read = *f;
    }
  }
  const double step = alone.finished->timings.answer_ms / 60;
  ASSERT_GT(gaps.size(), 20u) << "tokens came while the prompt was read";
  std::sort(gaps.begin(), gaps.end());
  // The documented bound is 2.5 steps and one smallest piece on an idle machine; tests may share theirs. A chunk
  // through all layers would take 70 steps, the prompt 600.
  EXPECT_LT(gaps[gaps.size() / 2], 6 * step) << "ordinary step " << step << " ms, median gap " << gaps[gaps.size() / 2];
  RecordProperty("gap_99_in_steps", std::to_string(gaps[gaps.size() * 99 / 100] / step));
  if (talked) return;
  talking->cancel();
  wait_for(*talking);
}

TEST_F(SchedulerTest, WorkOnIdleSlotsOnly) {
  start(1);
  run(request(100, 3));
  int64_t held = -1;
  EXPECT_TRUE(scheduler_
                  ->with_idle_slot(0,
                                   [&](Slot& slot, const Pause&) {
                                     held = int64_t(slot.held().size());
                                     return Status();
                                   })
                  .ok());
  EXPECT_EQ(held, 102);
  EXPECT_EQ(scheduler_->with_idle_slot(1, [](Slot&, const Pause&) { return Status(); }).code(), Code::kInvalidArgument);
  // An answer of the tiny model can be over before it is looked at: one of many is caught.
  Code code = Code::kOk;
  for (int i = 0; i < 100 && code == Code::kOk; ++i) {
    auto busy = scheduler_->submit(request(300, 150));
    wait_for_text(*busy);
    code = scheduler_->with_idle_slot(0, [](Slot&, const Pause&) { return Status(); }).code();
    busy->cancel();
  }
  EXPECT_EQ(code, Code::kInvalidArgument);
}

TEST_F(SchedulerTest, TheEndOfTheServerEndsEveryRequest) {
  start(1);
  std::vector<std::shared_ptr<EventQueue>> queues;
  for (uint32_t i = 0; i < 4; ++i) queues.push_back(scheduler_->submit(request(300, 200, i)));
  scheduler_.reset();
  for (const auto& q : queues) {
    const Outcome o = wait_for(*q, 1);
    EXPECT_TRUE(o.error || o.finished);
  }
}

}  // namespace
}  // namespace longkv::server
