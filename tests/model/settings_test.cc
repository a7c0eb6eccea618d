// What model files ask for: every key and tensor that a family reads is known as its own.
#include "model/settings.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/log.h"
#include "engine/session.h"
#include "gguf/gguf.h"
#include "support/golden.h"

namespace longkv {
namespace {

TEST(ModelSettings, NothingThatATinyModelAsksForIsLeftOut) {
  int families = 0;
  for (const std::string& name : test::tiny_goldens()) {
    SCOPED_TRACE(name);
    const int64_t before = notice_count();
    const auto model = LoadedModel::load(test::tiny_model(name));
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ(notice_count(), before);
    ++families;
  }
  EXPECT_GT(families, 5);
}

// What one family reads is unread in another, and said to be.
TEST(ModelSettings, KeysOfAnotherFamilyAreUnread) {
  for (const std::string& name : test::tiny_goldens()) {
    const auto file = GgufFile::open(test::tiny_model(name));
    ASSERT_TRUE(file.ok()) << file.status().message();
    const auto& keys = file->metadata().all();
    const auto is_window = [](const auto& entry) { return entry.first.ends_with(".attention.sliding_window"); };
    const bool has_window = std::any_of(keys.begin(), keys.end(), is_window);
    Family own = *find_family(file->metadata().string("general.architecture").value());
    own.keys = {};
    const int64_t before = notice_count();
    EXPECT_TRUE(report_unread_settings(file->metadata(), own).ok());
    EXPECT_EQ(notice_count() - before, has_window ? 1 : 0) << name;
  }
}

}  // namespace
}  // namespace longkv
