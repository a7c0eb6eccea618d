// Work that takes long beside a running answer: a prompt's copy into the prefix cache, slots that are saved and
// restored.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "engine/prefix_cache.h"
#include "harness.h"

namespace longkv::server {
namespace {

using std::chrono::milliseconds;

// An answer that goes on in the background, its tokens counted as they come.
class Talker {
 public:
  explicit Talker(Scheduler& scheduler) : events_(scheduler.submit(random_request(20, -1, 5))) {
    reader_ = std::thread([this] {
      while (!ended_) {
        for (const Event& event : events_->take(milliseconds(20))) {
          if (std::holds_alternative<TextPiece>(event)) ++tokens_;
          if (std::holds_alternative<Finished>(event) || std::holds_alternative<Status>(event)) ended_ = true;
        }
      }
    });
    while (tokens_ == 0 && !ended_) std::this_thread::sleep_for(milliseconds(1));
  }
  ~Talker() {
    events_->cancel();
    reader_.join();
  }
  int tokens() const { return tokens_; }
  bool ended() const { return ended_; }

 private:
  std::shared_ptr<EventQueue> events_;
  std::atomic<int> tokens_{0};
  std::atomic<bool> ended_{false};
  std::thread reader_;
};

TEST(Aside, AnAnswerGoesOnWhileAPromptIsStored) {
  constexpr int64_t kPrompt = 4000;
  TestServer server([](ServiceOptions& s, HttpOptions&) {
    s.scheduler.session.context = 8192;  // room for a long answer
    s.scheduler.prefixes = *PrefixCache::create({.ram_bytes = 1 << 30});
    s.scheduler.session.chunk = 32;
  });
  Scheduler& scheduler = server.service().scheduler();
  int most = 0, tries = 0;
  // The answer may end first, or the machine may be busy just then.
  for (; tries < 10 && most < 4; ++tries) {
    Talker talker(scheduler);
    const auto other = scheduler.submit(random_request(kPrompt, 3, 100 + uint32_t(tries)));
    std::vector<int> seen;  // tokens of the talker when one of the other came
    while (seen.size() < 3) {
      for (const Event& event : other->take(milliseconds(100))) {
        if (std::holds_alternative<TextPiece>(event)) seen.push_back(talker.tokens());
        ASSERT_FALSE(std::holds_alternative<Status>(event));
      }
    }
    if (!talker.ended()) most = std::max(most, seen[1] - seen[0]);
  }
  EXPECT_GE(most, 4) << "a copy in one go lets one token through";
  EXPECT_TRUE(server.until_slots(all_idle, 20));
  // What was copied in pieces is found, and is whole.
  GenerateRequest again = random_request(kPrompt, 3, 100);
  again.slot = 1;
  ASSERT_TRUE(scheduler.with_idle_slot(0, [](Slot& slot, const Pause&) { return slot.erase(), Status(); }).ok());
  ASSERT_TRUE(scheduler.with_idle_slot(1, [](Slot& slot, const Pause&) { return slot.erase(), Status(); }).ok());
  const auto answer = [&](GenerateRequest r) {
    std::vector<int32_t> ids;
    Timings timings;
    const auto events = scheduler.submit(std::move(r));
    for (bool ended = false; !ended;) {
      for (const Event& event : events->take(milliseconds(100))) {
        if (const auto* piece = std::get_if<TextPiece>(&event))
          ids.insert(ids.end(), piece->ids.begin(), piece->ids.end());
        if (const auto* finished = std::get_if<Finished>(&event)) timings = finished->timings, ended = true;
        ended |= std::holds_alternative<Status>(event);
      }
    }
    return std::pair(ids, timings);
  };
  const auto [hit, timings] = answer(again);
  EXPECT_GT(timings.cached_tokens, kPrompt - 64);
  EXPECT_TRUE(timings.from_cache);
  again.reuse = Reuse::kNone;
  EXPECT_EQ(hit, answer(again).first);
}

TEST(Aside, AnActionBesideAnAnswerGoesOnInPieces) {
  TestServer server([](ServiceOptions& s, HttpOptions&) { s.scheduler.session.context = 8192; });
  Scheduler& scheduler = server.service().scheduler();
  bool alone = false;
  ASSERT_TRUE(scheduler
                  .with_idle_slot(1,
                                  [&](Slot&, const Pause& pause) {
                                    alone = !pause;
                                    return Status();
                                  })
                  .ok());
  EXPECT_TRUE(alone) << "an idle server's machine is all its own";
  int said = 0;
  bool paused = false;
  for (int tries = 0; tries < 10 && !(paused && said >= 10); ++tries) {
    Talker talker(scheduler);
    const Status done = scheduler.with_idle_slot(1, [&](Slot&, const Pause& pause) {
      paused = bool(pause);
      const int before = talker.tokens();
      for (int i = 0; i < 40; ++i) {
        std::this_thread::sleep_for(milliseconds(1));
        pause_at(pause);
      }
      said = talker.ended() ? 0 : talker.tokens() - before;
      return Status(Code::kIo, "as it was");
    });
    EXPECT_EQ(done.message(), "as it was");
  }
  EXPECT_TRUE(paused);
  EXPECT_GE(said, 10);
}

TEST(Aside, SlotsAreSavedAndRestoredBesideAnAnswer) {
  const std::string folder = ::testing::TempDir() + "longkv-aside";
  std::filesystem::create_directories(folder);
  TestServer server([&](ServiceOptions& s, HttpOptions& h) {
    s.scheduler.session.context = 8192;
    h.slot_folder = folder;
  });
  const std::string text(200, 'b');
  const json before = server.post("/completion", completion(text, {{"n_predict", 8}, {"id_slot", 1}})).parsed();
  bool beside = false;
  for (int tries = 0; tries < 10 && !beside; ++tries) {
    Talker talker(server.service().scheduler());
    ASSERT_EQ(server.post("/slots/1?action=save", {{"filename", "aside.kv"}}).status, 200);
    ASSERT_EQ(server.post("/slots/1?action=erase", json::object()).parsed()["n_erased"], 207);
    const Reply restored = server.post("/slots/1?action=restore", {{"filename", "aside.kv"}});
    ASSERT_EQ(restored.status, 200) << restored.body;
    EXPECT_EQ(restored.parsed()["n_restored"], 207);
    // Damaged in a row, which sums made in pieces find too. The slot's own file is mapped and stays as it is.
    std::filesystem::copy_file(folder + "/aside.kv", folder + "/bad.kv",
                               std::filesystem::copy_options::overwrite_existing);
    std::fstream bad(folder + "/bad.kv", std::ios::in | std::ios::out | std::ios::binary);
    bad.seekp(int64_t(std::filesystem::file_size(folder + "/bad.kv") / 2));
    bad.put('x').put('y');
    bad.close();
    EXPECT_EQ(server.post("/slots/1?action=restore", {{"filename", "bad.kv"}}).status, 409);
    beside = !talker.ended();
  }
  EXPECT_TRUE(beside);
  const json after =
      server.post("/completion", completion(text, {{"n_predict", 8}, {"id_slot", 1}, {"kv_reuse", "any"}})).parsed();
  EXPECT_EQ(after["content"], before["content"]);
  EXPECT_EQ(after["timings"]["cache_n"], 199);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace longkv::server
