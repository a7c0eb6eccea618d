// A prompt read in pieces of work: the same bits as one read at once, however it is cut.
#include <gtest/gtest.h>

#include "engine/session.h"
#include "support/golden.h"
#include "support/paths.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::random_ids;

std::vector<float> logits_of(const Session& session) { return {session.logits().begin(), session.logits().end()}; }

struct Fixture {
  std::shared_ptr<const LoadedModel> model;
  ThreadPool pool{2};

  std::unique_ptr<Session> session(const std::string& kv, int64_t chunk, int64_t context = 1024) {
    SessionOptions o;
    o.context = context;
    o.recipe = *parse_recipe(kv);
    o.chunk = chunk;
    auto s = Session::create(model, o, pool);
    EXPECT_TRUE(s.ok()) << s.status().message();
    return std::move(s).value();
  }
};

void read(Session& session, std::span<const int32_t> ids, int64_t at_most = INT64_MAX) {
  ASSERT_TRUE(session.start_prompt(ids).ok());
  for (;;) {
    const auto done = session.read_piece(nullptr, at_most);
    ASSERT_TRUE(done.ok()) << done.status().message();
    if (*done) return;
  }
}

TEST(SessionPieces, EqualAPromptReadAtOnce) {
  Fixture f;
  for (const char* name : {"llama", "gemma3"}) {
    f.model = *LoadedModel::load(test::tiny_model(name));
    for (const char* kv : {"full", "quest:block=16,budget=64,dense_layers=0", "snapkv:budget=96"}) {
      for (const int64_t n : {1, 31, 64, 65, 200}) {
        const auto ids = random_ids(n, f.model->config().vocab);
        auto whole = f.session(kv, 64), pieces = f.session(kv, 64);
        ASSERT_TRUE(whole->prefill(ids).ok());
        read(*pieces, ids);
        ASSERT_EQ(logits_of(*pieces), logits_of(*whole)) << name << " " << kv << " " << n;
        for (const int32_t id : {5, 9, 2}) {
          ASSERT_TRUE(whole->decode(id).ok() && pieces->decode(id).ok());
          ASSERT_EQ(logits_of(*pieces), logits_of(*whole)) << name << " " << kv << " " << n;
        }
      }
    }
  }
}

// Shorter chunks, with rests of every small length, and a prompt that goes on from rows of another one.
TEST(SessionPieces, ShorterChunksDoNotChangeABit) {
  Fixture f;
  const std::string path = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
  if (path.empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  f.model = *LoadedModel::load(path);
  const auto vocab = int32_t(f.model->config().vocab);
  const auto all = random_ids(240, vocab);
  for (const int64_t n : {161, 163, 164, 165, 240}) {
    const auto ids = std::span(all).first(size_t(n));
    auto whole = f.session("full", 512), cut = f.session("full", 512), reused = f.session("full", 512);
    read(*whole, ids);
    read(*cut, ids, 40);
    ASSERT_EQ(logits_of(*cut), logits_of(*whole)) << n;
    EXPECT_EQ(cut->origin().exact, whole->origin().exact);
    EXPECT_EQ(cut->ids(), whole->ids());
    std::vector<int32_t> other(ids.begin(), ids.end());
    for (size_t i = 130; i < other.size(); ++i) other[i] = (other[i] + 1) % vocab;
    read(*reused, other, 64);
    ASSERT_TRUE(reused->decode(3).ok());
    const int64_t from = reused->resume_point(std::min<int64_t>(130, reused->origin().exact), n);
    EXPECT_EQ(from, 130);
    ASSERT_TRUE(reused->truncate(from).ok());
    read(*reused, ids.subspan(size_t(from)), 33);
    ASSERT_EQ(logits_of(*reused), logits_of(*whole)) << n;
    for (const int32_t id : {5, 9}) {
      ASSERT_TRUE(reused->decode(id).ok() && whole->decode(id).ok());
      ASSERT_EQ(logits_of(*reused), logits_of(*whole)) << n;
    }
  }
}

TEST(SessionPieces, ADroppedPromptLeavesWhatItFound) {
  Fixture f;
  f.model = *LoadedModel::load(test::tiny_model("llama"));
  const auto ids = random_ids(300, f.model->config().vocab);
  for (const char* kv : {"full", "snapkv:budget=96"}) {
    auto s = f.session(kv, 32), fresh = f.session(kv, 32);
    std::atomic<bool> cancel{false};
    ASSERT_TRUE(s->start_prompt(ids).ok());
    for (int i = 0; i < 2 * f.model->config().layers + 1; ++i) ASSERT_TRUE(s->read_piece(&cancel).ok());
    cancel = true;
    EXPECT_EQ(s->read_piece(&cancel).status().code(), Code::kCancelled);
    s->drop_prompt();
    EXPECT_EQ(s->tokens(), std::string(kv) == "full" ? 64 : 0);
    read(*s, std::span(ids).subspan(size_t(s->tokens())));
    read(*fresh, ids);
    EXPECT_EQ(logits_of(*s), logits_of(*fresh)) << kv;
    EXPECT_EQ(s->start_prompt(random_ids(1000, f.model->config().vocab)).code(), Code::kInvalidArgument);
    EXPECT_EQ(s->start_prompt({}).code(), Code::kInvalidArgument);
    EXPECT_EQ(s->tokens(), 300);
  }
}

}  // namespace
}  // namespace longkv
