// Sequences whose cache lies on a disk that becomes full while tokens are decoded, in the middle of a model.
#include <gtest/gtest.h>

#include "engine/kv_file.h"
#include "engine/session.h"
#include "support/golden.h"
#include "support/mkgguf.h"
#include "support/random_ids.h"
#include "support/small_disk.h"

namespace longkv {
namespace {

using test::random_ids;

// Arrays grow by 64 KiB: rows of 32 bytes, K and V of two heads.
constexpr int64_t kStep = 64 << 10, kRow = 32, kArrays = 4;

struct Scene {
  std::shared_ptr<const LoadedModel> model = LoadedModel::load(test::tiny_model("llama")).value();
  ThreadPool pool{1};

  std::unique_ptr<Session> session(const std::string& kv, std::shared_ptr<DiskSpace> disk) {
    SessionOptions o;
    o.context = 3000;
    o.recipe = parse_recipe(kv).value();
    o.kv_disk = std::move(disk);
    return Session::create(model, o, pool).value();
  }
};

bool same(const Session& a, const Session& b) {
  return std::equal(a.logits().begin(), a.logits().end(), b.logits().begin(), b.logits().end());
}

// A token that fails leaves the sequence as it was, whichever layer finds no room, and also where it is checked: then
// the full attention of the same token fails first.
int decode_into_a_full_disk(const std::string& folder) {
  Scene scene;
  const auto ids = random_ids(1980, scene.model->config().vocab);
  for (const int check_every : {0, 1}) {
    for (const int64_t room : {int64_t{0}, (kArrays + 1) * kStep}) {
      const auto small = scene.session("full", DiskSpace::create(folder).value()),
                 large = scene.session("full", nullptr);
      small->set_check_every(check_every);
      if (!small->prefill(ids).ok() || !large->prefill(ids).ok() || !same(*small, *large)) return 1;
      {
        const test::Filler filler(folder, room);
        if (!filler.full()) return 2;
        for (int64_t n = 1980; n < kStep / kRow; ++n) {
          if (!small->decode(ids[size_t(n - 1980)]).ok() || !large->decode(ids[size_t(n - 1980)]).ok()) return 3;
        }
        for (int i = 0; i < 2; ++i) {
          const Status full = small->decode(7);
          if (full.code() != Code::kIo || small->tokens() != kStep / kRow) return 4;
        }
      }
      for (const int32_t id : {7, 8}) {
        if (!small->decode(id).ok() || !large->decode(id).ok() || !same(*small, *large)) return 5;
      }
      if (small->tokens() != large->tokens()) return 6;
    }
  }
  return 0;
}

// Eviction in the layers before it has let go of what the sequence needs: it is empty then, and says so.
int evict_into_a_full_disk(const std::string& folder) {
  Scene scene;
  const auto ids = random_ids(300, scene.model->config().vocab);
  constexpr int64_t kPage = 4096;
  const std::string kv = "h2o:budget=" + std::to_string(kPage / kRow);  // one row more than a page
  const auto small = scene.session(kv, DiskSpace::create(folder).value()), large = scene.session(kv, nullptr);
  if (!small->prefill(ids).ok()) return 1;
  {
    const test::Filler filler(folder, (kArrays + 1) * (kStep - kPage));
    if (!filler.full()) return 2;
    const Status full = small->decode(7);
    if (full.code() != Code::kIo) return 3;
    if (full.message().find("is empty now") == std::string::npos || small->tokens() != 0) return 4;
  }
  if (!small->prefill(ids).ok() || !large->prefill(ids).ok()) return 5;
  for (const int32_t id : {7, 8}) {
    if (!small->decode(id).ok() || !large->decode(id).ok() || !same(*small, *large)) return 6;
  }
  return 0;
}

// A state that is restored onto a disk goes on with the bits of memory and takes no more room than reading it took: not
// for rows that a sliding window has let go of either.
TEST(SessionOnDisk, StatesAreRestoredThere) {
  const std::string folder = std::filesystem::temp_directory_path();
  ThreadPool pool(2);
  for (const char* name : {"llama", "gemma3"}) {
    SCOPED_TRACE(name);
    const auto model = LoadedModel::load(test::tiny_model(name)).value();
    const auto ids = random_ids(2500, model->config().vocab);
    SessionOptions o;
    o.context = 3000;
    const auto memory = Session::create(model, o, pool).value();
    const auto first = DiskSpace::create(folder).value(), second = DiskSpace::create(folder).value();
    o.kv_disk = first;
    const auto read = Session::create(model, o, pool).value();
    o.kv_disk = second;
    const auto restored = Session::create(model, o, pool).value();
    ASSERT_TRUE(memory->prefill(ids).ok() && read->prefill(ids).ok());
    const std::string path = test::write_temp("disk.kv", "");
    ASSERT_TRUE(save_session(*memory, path).ok());
    const auto done = restore_session(*restored, path);
    ASSERT_TRUE(done.ok()) << done.status().message();
    EXPECT_LE(second->allocated(), first->allocated() + (64 << 10));
    for (int i = 0; i < 40; ++i) {
      ASSERT_TRUE(memory->decode(ids[size_t(i)]).ok() && restored->decode(ids[size_t(i)]).ok());
      ASSERT_TRUE(same(*memory, *restored)) << i;
    }
    ASSERT_TRUE(memory->truncate(0).ok() && restored->truncate(0).ok());
    ASSERT_TRUE(memory->prefill(ids).ok() && restored->prefill(ids).ok());
    EXPECT_TRUE(same(*memory, *restored));
  }
}

TEST(SessionOnDisk, ATokenThatFindsNoRoomLeavesNoTrace) {
  const int result = test::on_a_small_disk("4m", decode_into_a_full_disk);
  if (result == test::kNoSmallDisk) GTEST_SKIP() << "no file system of its own can be mounted here";
  EXPECT_EQ(result, 0);
}

TEST(SessionOnDisk, ASequenceThatCannotBeRestoredIsEmpty) {
  const int result = test::on_a_small_disk("4m", evict_into_a_full_disk);
  if (result == test::kNoSmallDisk) GTEST_SKIP() << "no file system of its own can be mounted here";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace longkv
