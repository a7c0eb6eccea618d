// Channel masks from files.
#include "kv/mask/leank.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "kv/mask/torch_zip.h"
#include "kv_session/harness.h"

namespace longkv::test {
namespace {

class Leank : public ::testing::Test {
 protected:
  void SetUp() override {
    dir = std::filesystem::temp_directory_path() / ("longkv_leank_" + std::to_string(::getpid()));
    std::filesystem::create_directories(dir);
    Rng rng(3);
    alpha = rng.normal(2 * 2 * 64);
    for (size_t i = 0; i < alpha.size(); ++i) {
      const size_t head = i / 64;
      alpha[i] = head == 1 ? 0.0f : i % 2 == 0 ? 1.0f : 0.0f;  // head 1 of layer 0 keeps nothing
    }
  }
  void TearDown() override { std::filesystem::remove_all(dir); }
  std::string path(const char* name) const { return (dir / name).string(); }
  void write(const char* name, const std::string& bytes) const { std::ofstream(path(name), std::ios::binary) << bytes; }
  std::filesystem::path dir;
  std::vector<float> alpha;
  const KvShape shape = make_shape(2, 2, 2, 64);
};

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// A zip archive as torch.save writes it.
std::string zip_of(const std::vector<std::pair<std::string, std::string>>& entries, uint16_t method = 0) {
  std::string out, directory;
  for (const auto& [name, data] : entries) {
    const auto at = uint32_t(out.size());
    const auto fields = [&](std::string& to) {
      put(to, method);
      put(to, uint32_t(0));  // time, date
      put(to, uint32_t(0));  // checksum
      put(to, uint32_t(data.size()));
      put(to, uint32_t(data.size()));
      put(to, uint16_t(name.size()));
    };
    put(out, uint32_t(0x04034b50));
    put(out, uint32_t(20));
    fields(out);
    put(out, uint16_t(3));
    out += name + "pad" + data;
    put(directory, uint32_t(0x02014b50));
    put(directory, uint16_t(20));
    put(directory, uint32_t(20));
    fields(directory);
    put(directory, uint16_t(0));
    put(directory, uint16_t(0));
    directory.append(8, '\0');
    put(directory, at);
    directory += name;
  }
  const auto start = uint32_t(out.size());
  out += directory;
  put(out, uint32_t(0x06054b50));
  put(out, uint32_t(0));
  put(out, uint16_t(entries.size()));
  put(out, uint16_t(entries.size()));
  put(out, uint32_t(directory.size()));
  put(out, start);
  put(out, uint16_t(0));
  return out;
}

std::string bytes_of(const std::vector<float>& x) {
  return {reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float)};
}

void expect_mask(const Result<LeankMask>& mask) {
  ASSERT_TRUE(mask.ok()) << mask.status().message();
  ASSERT_EQ(mask->heads.size(), 4u);
  for (size_t h = 0; h < 4; ++h) {
    ASSERT_EQ(mask->heads[h].channels.size(), h == 1 ? 0u : 32u);
    EXPECT_TRUE(mask->heads[h].alpha.empty());
    for (size_t i = 0; i < mask->heads[h].channels.size(); ++i) EXPECT_EQ(mask->heads[h].channels[i], 2 * i);
  }
}

TEST_F(Leank, EveryFormOfFile) {
  ASSERT_TRUE(save_leank(path("mask.gguf"), shape, alpha, 64, 256, "tiny").ok());
  const auto sidecar = load_leank(path("mask.gguf"), shape);
  expect_mask(sidecar);
  EXPECT_EQ(sidecar->sink, 64);
  EXPECT_EQ(sidecar->window, 256);
  EXPECT_EQ(sidecar->model, "tiny");
  std::string text;
  for (size_t i = 0; i < alpha.size(); ++i)
    text += (alpha[i] == 0.0f ? "0.0" : "1.0") + std::string(i % 128 == 127 ? "\n" : "\t");
  write("mask.tsv", text);
  expect_mask(load_leank(path("mask.tsv"), shape));
  write("mask.pth", zip_of({{"m/data.pkl", "torch FloatStorage"}, {"m/data/0", bytes_of(alpha)}, {"m/version", "3"}}));
  expect_mask(load_leank(path("mask.pth"), shape));
  const std::vector<float> first(alpha.begin(), alpha.begin() + 128), second(alpha.begin() + 128, alpha.end());
  write("list.pth",
        zip_of({{"m/data.pkl", "torch FloatStorage"}, {"m/data/0", bytes_of(first)}, {"m/data/1", bytes_of(second)}}));
  expect_mask(load_leank(path("list.pth"), shape));
}

TEST_F(Leank, RefusesWhatIsNotForTheModel) {
  const auto refused = [&](const char* name, const KvShape& s, const char* what) {
    const auto mask = load_leank(path(name), s);
    ASSERT_FALSE(mask.ok()) << name;
    EXPECT_NE(mask.status().message().find(what), std::string::npos) << mask.status().message();
  };
  ASSERT_TRUE(save_leank(path("mask.gguf"), shape, alpha, 0, 0, "").ok());
  refused("mask.gguf", make_shape(3, 2, 2, 64), "2 layers");
  refused("absent", shape, "absent");
  write("short.tsv", "1 0 1");
  refused("short.tsv", shape, "3 values");
  write("word.tsv", "1 0 x");
  refused("word.tsv", shape, "found 'x'");
  auto bad = alpha;
  bad[5] = NAN;
  write("nan.pth", zip_of({{"m/data.pkl", "FloatStorage"}, {"m/data/0", bytes_of(bad)}}));
  refused("nan.pth", shape, "channel 5");
  write("packed.pth", zip_of({{"m/data.pkl", "FloatStorage"}, {"m/data/0", bytes_of(alpha)}}, 8));
  refused("packed.pth", shape, "compressed");
  write("int.pth", zip_of({{"m/data.pkl", "LongStorage"}, {"m/data/0", bytes_of(alpha)}}));
  refused("int.pth", shape, "floating-point");
  const std::string whole = zip_of({{"m/data.pkl", "FloatStorage"}, {"m/data/0", bytes_of(alpha)}});
  for (size_t cut = 0; cut < whole.size(); cut += 7) {
    write("cut.pth", whole.substr(0, cut));
    EXPECT_FALSE(load_leank(path("cut.pth"), shape).ok()) << cut;
  }
  EXPECT_FALSE(save_leank(path("x.gguf"), shape, {1.0f}, 0, 0, "").ok());
}

// Old rows with the kept channels only; the head without any keeps its mean.
TEST_F(Leank, SessionsAttendKeptChannels) {
  for (size_t i = 0; i < alpha.size(); ++i) alpha[i] *= i < 64 ? 0.5f : 1.0f;  // scaled channels in one head
  ASSERT_TRUE(save_leank(path("mask.gguf"), shape, alpha, 0, 0, "").ok());
  ThreadPool pool(2);
  const Tokens t(shape, 400, 4);
  for (const char* store : {"", "+q8", "+kivi2"}) {
    const std::string text = "leank:mask=" + path("mask.gguf") + ",sink=4,window=32" + store;
    const auto recipe = parse_recipe(text);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    EXPECT_EQ(*parse_recipe(recipe->canonical()), *recipe);
    auto session = make_session(shape, *recipe, 400, pool);
    feed_prompt(*session, t, 0, 300, 300);
    const auto outs = decode_token(*session, t, 300);
    const KvMiddle* m = session->cache().view(0, 0).middle;
    ASSERT_NE(m, nullptr);
    EXPECT_EQ(m->dim_k, 32);
    EXPECT_EQ(session->cache().view(0, 1).middle->dim_k, 0);
    if (*store != '\0') continue;
    for (int layer = 0; layer < 2; ++layer) {
      Tokens masked = t;
      for (int64_t r = m->begin; r < m->end; ++r) {
        for (int h = 0; h < 2; ++h) {
          for (int c = 0; c < 64; ++c) {
            masked.k[size_t((r * 2 + h) * 64 + c)] *= alpha[size_t((layer * 2 + h) * 64 + c)];
          }
        }
      }
      for (int j = 0; j < 4; ++j) {
        const Partial p = reference_attend(shape, masked, 300, j, {{0, 301}}, 0.125);
        for (int c = 0; c < 64; ++c) EXPECT_NEAR(outs[size_t(layer)][size_t(j * 64 + c)], p.out[size_t(c)], 2e-3);
      }
    }
  }
}

}  // namespace
}  // namespace longkv::test
