#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "kv/mask/gates.h"
#include "kv/mask/identity.h"
#include "kv_keep/oracle.h"
#include "support/paths.h"

namespace longkv::test {
namespace {

std::string gates_file(const std::string& name, const std::string& text) {
  const std::string path = temp_path(name);
  std::ofstream(path) << text;
  return path;
}

Result<std::unique_ptr<KvSession>> duo(const KvShape& s, const std::string& path, const std::string& more,
                                       ThreadPool& pool) {
  const auto recipe = parse_recipe("duo:gates=\"" + path + "\",sink=3,window=10" + more + "+store=f32");
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return KvSession::create(s, recipe.value(), {512}, plain_params(s), pool);
}

TEST(Duo, LowGatesStreamAndTheOthersKeepAll) {
  ThreadPool pool(2);
  const KvShape s = make_shape(3, 2, 2, 32);
  const Tokens t(s, 200, 60);
  const std::string path = gates_file("gates.tsv", "0.9\t0.1\n1\t1e-3\n0.5\t0.7\n");
  const std::vector<std::vector<int>> streams = {{0, 1}, {0, 1}, {1, 0}};  // ratio 0.5: three of six
  auto session = duo(s, path, ",ratio=0.5", pool);
  ASSERT_TRUE(session.ok()) << session.status().message();
  const auto held = [&](int l, int h, int64_t n) {
    Positions p;
    for (int64_t i = 0; i < n; ++i) {
      if (streams[size_t(l)][size_t(h)] == 0 || i < 3 || i >= n - 10) p.push_back(i);
    }
    return p;
  };
  feed_prompt(**session, t, 0, 60, 25);
  for (int64_t n = 60; n < 90; ++n) {
    const auto outs = decode_token(**session, t, n);
    for (int l = 0; l < 3; ++l) {
      for (int h = 0; h < 2; ++h) ASSERT_EQ(sorted_positions(**session, l, h), held(l, h, n + 1));
      expect_attends(s, t, n, {held(l, 0, n + 1), held(l, 1, n + 1)}, outs[size_t(l)].data());
    }
  }
  feed_prompt(**session, t, 90, 130, 40);
  for (int l = 0; l < 3; ++l) {
    for (int h = 0; h < 2; ++h) ASSERT_EQ(sorted_positions(**session, l, h), held(l, h, 130));
  }
}

TEST(Duo, NoStreamingHeadIsFull) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 2, 2, 32);
  const Tokens t(s, 100, 61);
  auto session = duo(s, gates_file("ties.tsv", "1 1\n1 1\n"), ",ratio=0", pool);
  ASSERT_TRUE(session.ok());
  auto full = make_session(s, full_f32(), 512, pool);
  EXPECT_EQ(feed_prompt(**session, t, 0, 60, 25), feed_prompt(*full, t, 0, 60, 25));
  EXPECT_EQ(decode_token(**session, t, 60), decode_token(*full, t, 60));
}

// The sidecar chooses the same heads as the authors' table, and is written back as one.
TEST(Duo, SidecarAndTableAreOne) {
  ThreadPool pool(1);
  const KvShape s = make_shape(3, 2, 2, 32);
  const Tokens t(s, 100, 62);
  const std::string text = "0.900000\t0.125000\n1.000000\t0.001000\n0.500000\t0.750000\n";
  const std::string table = gates_file("table.tsv", text), sidecar = temp_path("gates.gguf");
  auto gates = load_gates(table, s, "any model; shape");
  ASSERT_TRUE(gates.ok()) << gates.status().message();
  EXPECT_EQ(gates_table(*gates), text);
  gates->sink = 3;
  gates->window = 10;
  gates->model = "this; shape";
  ASSERT_TRUE(save_gates_sidecar(sidecar, *gates).ok());
  const auto loaded = load_gates(sidecar, s, "this; shape");
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(gates_table(*loaded), text);
  EXPECT_EQ(loaded->sink, 3);
  EXPECT_EQ(loaded->window, 10);
  auto a = duo(s, table, "", pool), b = duo(s, sidecar, "", pool);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(feed_prompt(**a, t, 0, 60, 25), feed_prompt(**b, t, 0, 60, 25));
  EXPECT_EQ(decode_token(**a, t, 60), decode_token(**b, t, 60));
  // Another model's, by name and by shape.
  EXPECT_NE(load_gates(sidecar, s, "other; shape").status().message().find("was learned for 'this"), std::string::npos);
  EXPECT_EQ(load_gates(sidecar, make_shape(2, 2, 2, 32), "this; shape").status().code(), Code::kInvalidArgument);
  std::filesystem::resize_file(sidecar, std::filesystem::file_size(sidecar) - 1);
  EXPECT_FALSE(load_gates(sidecar, s, "this; shape").ok());
}

TEST(Duo, IdentitiesAreComparedWholeWhereBothAre) {
  EXPECT_EQ(identity_difference("", "a; x"), "");
  EXPECT_EQ(identity_difference("a; x", ""), "");
  EXPECT_EQ(identity_difference("a", "a; x"), "");  // a name alone, as older files have
  EXPECT_EQ(identity_difference("a; x", "a; x"), "");
  EXPECT_NE(identity_difference("a; x", "a; y"), "");  // another rope
  EXPECT_NE(identity_difference("b", "a; x"), "");
}

TEST(Duo, RefusesFilesOfOtherModels) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 2, 2, 32);
  const auto message = [&](const std::string& name, const std::string& text) {
    return duo(s, gates_file(name, text), "", pool).status().message();
  };
  EXPECT_NE(message("a.tsv", "1 1\n").find("1 layers, the model has 2"), std::string::npos);
  EXPECT_NE(message("b.tsv", "1 1 1\n1 1 1\n").find("3 gates, the model has 2"), std::string::npos);
  EXPECT_NE(message("c.tsv", "1 1\n1 nan\n").find("line 2: 'nan'"), std::string::npos);
  EXPECT_NE(message("d.tsv", "1 1\n1 0.5x\n").find("not a number"), std::string::npos);
  EXPECT_NE(duo(s, "/nowhere/gates.tsv", "", pool).status().message().find("cannot read"), std::string::npos);
  EXPECT_NE(parse_recipe("duo").status().message().find("gates="), std::string::npos);
  EXPECT_NE(parse_recipe("duo:gates=x.tsv+quest").status().message().find("nearest legal"), std::string::npos);
}

}  // namespace
}  // namespace longkv::test
