// Channel masks from files.
#include "kv/mask/leank.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/float16.h"
#include "kv/attend.h"
#include "kv/codec/codec.h"
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

// A mask of factors with what a sidecar says beside them.
LeankMask mask_of(const std::vector<float>& factors, int64_t sink = 0, int64_t window = 0, const char* model = "") {
  LeankMask mask = mask_of_factors(factors, 64);
  mask.sink = sink;
  mask.window = window;
  mask.model = model;
  return mask;
}

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
  ASSERT_TRUE(save_leank_sidecar(path("mask.gguf"), shape, mask_of(alpha, 64, 256, "tiny")).ok());
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
  ASSERT_TRUE(save_leank_sidecar(path("mask.gguf"), shape, mask_of(alpha)).ok());
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
  EXPECT_FALSE(save_leank_sidecar(path("x.gguf"), shape, mask_of(std::vector<float>(64, 1.0f))).ok());
}

// What is written for the authors' programs is read as theirs is, and equals what torch.save writes but for names.
TEST_F(Leank, ExportsAreReadAsTheAuthorsFiles) {
  const auto factors = channel_factors(mask_of(alpha), 64);
  ASSERT_TRUE(factors.ok());
  EXPECT_EQ(*factors, alpha);
  const std::vector<uint8_t> zip = write_torch_floats(*factors, {2, 2, 64});
  write("out.pth", std::string(zip.begin(), zip.end()));
  expect_mask(load_leank(path("out.pth"), shape));
  // The storage begins where torch maps it.
  const std::string name = "mask/data/0", bytes(zip.begin(), zip.end());
  const size_t at = bytes.find(name);
  ASSERT_NE(at, std::string::npos);
  uint16_t extra;
  std::memcpy(&extra, zip.data() + at - 2, sizeof(extra));
  EXPECT_EQ((at + name.size() + extra) % 64, 0u);
  LeankMask directed;
  directed.heads.resize(4);
  directed.heads[0].keys = directed.heads[0].queries = std::vector<float>(64, 1.0f);
  EXPECT_EQ(channel_factors(directed, 64).status().code(), Code::kUnsupported);
}

// Heads of 16 directions, of 16 scaled channels and without any, in every way that the latter can count.
LeankMask mixed_mask(RemovedAs removed) {
  Rng rng(8);
  LeankMask mask;
  mask.heads.resize(4);
  for (int h : {0, 3}) {
    mask.heads[size_t(h)].keys = rng.normal(16 * 64);
    mask.heads[size_t(h)].queries = rng.normal(16 * 64);
    for (float& x : mask.heads[size_t(h)].keys) x *= 0.2f;
    for (float& x : mask.heads[size_t(h)].queries) x *= 0.2f;
  }
  mask.heads[1].removed = removed;
  mask.heads[1].score = -0.75f;
  for (int c = 0; c < 16; ++c) mask.heads[2].channels.push_back(uint16_t(3 * c)), mask.heads[2].alpha.push_back(0.5f);
  return mask;
}

TEST_F(Leank, DirectionsAndMeansOfWhatIsLost) {
  ThreadPool pool(2);
  Tokens t(shape, 400, 4);
  for (float& x : t.k) x += 0.3f;  // keys whose mean is not zero
  // Values that f16 holds leave no rounding wherever rows are encoded.
  for (float& x : t.k) x = to_float(to_f16(x));
  for (float& x : t.v) x = to_float(to_f16(x));
  for (bool compensate : {false, true}) {
    for (RemovedAs removed : {RemovedAs::kMean, RemovedAs::kConstant, RemovedAs::kDrop}) {
      LeankMask mask = mixed_mask(removed);
      mask.compensate = compensate;
      ASSERT_TRUE(save_leank_sidecar(path("mask.gguf"), shape, mask).ok());
      const auto loaded = load_leank(path("mask.gguf"), shape);
      ASSERT_TRUE(loaded.ok()) << loaded.status().message();
      EXPECT_EQ(loaded->heads, mask.heads);
      EXPECT_EQ(loaded->compensate, compensate);
      const auto recipe = parse_recipe("leank:mask=\"" + path("mask.gguf") + "\",sink=4,window=32+store=f32");
      ASSERT_TRUE(recipe.ok()) << recipe.status().message();
      auto session = make_session(shape, *recipe, 400, pool);
      feed_prompt(*session, t, 0, 300, 300);
      const auto outs = decode_token(*session, t, 300);
      const KvMiddle* m = session->cache().view(0, 0).middle;
      ASSERT_NE(m, nullptr);
      EXPECT_EQ(m->dim_k, 16);
      EXPECT_EQ(m->end, 4 + 256);
      for (int layer = 0; layer < 2; ++layer) {
        // Scores in double: s = q (mix k + (1 - mix) mean) / 8 for old rows.
        for (int j = 0; j < 4; ++j) {
          const int h = j / 2;
          const HeadMask& head = mask.heads[size_t(layer * 2 + h)];
          std::vector<double> mix(64 * 64, 0.0), mean(64, 0.0), score;
          for (size_t i = 0; i < head.keys.size() / 64; ++i) {
            for (size_t a = 0; a < 64 * 64; ++a) {
              mix[a] += double(head.queries[i * 64 + a / 64]) * head.keys[i * 64 + a % 64];
            }
          }
          for (size_t i = 0; i < head.channels.size(); ++i) mix[size_t(head.channels[i]) * 65] = head.alpha[i];
          const auto key = [&](int64_t r) { return t.k.data() + (r * 2 + h) * 64; };
          const float* q = t.q.data() + (300 * 4 + j) * 64;
          for (int64_t r = m->begin; r < m->end; ++r) {
            for (size_t c = 0; c < 64; ++c) mean[c] += key(r)[c] / double(m->end - m->begin);
          }
          const bool gone = head.kept(64) == 0;
          const bool add_mean = gone ? removed == RemovedAs::kMean : compensate;
          double sum = 0;
          std::vector<double> out(64, 0.0);
          for (int64_t r = 0; r <= 300; ++r) {
            const bool old = r >= m->begin && r < m->end;
            if (old && gone && removed == RemovedAs::kDrop) continue;
            double s = 0;
            for (size_t a = 0; a < 64; ++a) {
              if (!old) s += double(q[a]) * key(r)[a] / 8;
              for (size_t c = 0; old && c < 64; ++c) {
                const double one = a == c ? 1.0 : 0.0;
                s += q[a] * (mix[a * 64 + c] * key(r)[c] + (add_mean ? (one - mix[a * 64 + c]) * mean[c] : 0.0)) / 8;
              }
            }
            if (old && gone && removed == RemovedAs::kConstant) s = head.score;
            sum += std::exp(s);
            for (size_t c = 0; c < 64; ++c) out[c] += std::exp(s) * t.v[size_t((r * 2 + h) * 64) + c];
          }
          for (size_t c = 0; c < 64; ++c) {
            ASSERT_NEAR(outs[size_t(layer)][size_t(j) * 64 + c], out[c] / sum, 2e-4)
                << "compensate " << compensate << ", removed " << int(removed) << ", layer " << layer << ", head " << j;
          }
        }
      }
      // Scores are those of the decoded keys.
      std::vector<float> decoded(64);
      const KvHeadView view = session->cache().view(0, 0);
      decode_k_rows(view, 100, 101, decoded.data());
      const std::vector<RowRange> one{{100, 101}};
      AttendUnit unit;
      const float* q = t.q.data() + 300 * 4 * 64;
      unit.q = q;
      unit.n_q = 1;
      unit.kv = view;
      unit.ranges = one;
      float score = 0;
      attend_scores(unit, AttendParams{0.125f, 0.0f}, &score, pool);
      double expected = 0;
      for (size_t c = 0; c < 64; ++c) expected += 0.125 * double(q[c]) * decoded[c];
      EXPECT_NEAR(score, expected, 1e-4);
    }
  }
}

// Old rows with the kept channels only; the head without any keeps its mean.
TEST_F(Leank, SessionsAttendKeptChannels) {
  for (size_t i = 0; i < alpha.size(); ++i) alpha[i] *= i < 64 ? 0.5f : 1.0f;  // scaled channels in one head
  ASSERT_TRUE(save_leank_sidecar(path("mask.gguf"), shape, mask_of(alpha)).ok());
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
