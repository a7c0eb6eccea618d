// AsymKV and KVSlimmer as whole sessions, with gradients given by hand, against a second writing in double that follows
// rows one by one: keys, values, biases, counts and positions of every row, after every chunk.
#include <gtest/gtest.h>

#include "kv_keep/oracle.h"

namespace longkv::test {
namespace {

using Vec = std::vector<double>;

struct Row {
  Vec k, v, g;
  bool has_g = false;
  double bias = 0, mass = 0, h = 0;
  int64_t count = 1, pos = 0;
  bool fixed = false;
};

Vec turned(Vec x, double delta) {
  for (size_t i = 0; i < x.size() / 2; ++i) {
    const double angle = delta * std::pow(100.0, -2.0 * double(i) / double(x.size()));
    const double a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * std::cos(angle) - b * std::sin(angle);
    x[2 * i + 1] = a * std::sin(angle) + b * std::cos(angle);
  }
  return x;
}

class Oracle {
 public:
  Oracle(const KeepSpec& spec, const KvShape& shape) : spec_(spec), s_(shape), heads_(size_t(shape.kv_heads)) {}

  // gradient: [kv_heads][rows held, then n][dim_k].
  void chunk(const Tokens& t, int64_t begin, int64_t n, const std::vector<float>& gradient) {
    ++chunks_;
    std::vector<std::vector<Row>> own(heads_.size());
    for (size_t h = 0; h < heads_.size(); ++h) {
      for (int64_t i = begin; i < begin + n; ++i) {
        Row row;
        row.k.assign(t.k_at(s_, i) + int64_t(h) * s_.dim_k, t.k_at(s_, i) + int64_t(h + 1) * s_.dim_k);
        row.v.assign(t.v_at(s_, i) + int64_t(h) * s_.dim_v, t.v_at(s_, i) + int64_t(h + 1) * s_.dim_v);
        row.pos = i;
        own[h].push_back(row);
      }
      give_mass(t, int(h), begin, own[h]);
    }
    const auto held = int64_t(heads_[0].size()), rows = held + n;
    for (size_t h = 0; h < heads_.size(); ++h) {
      for (int64_t r = 0; r < rows; ++r) {
        Row& row = r < held ? heads_[h][size_t(r)] : own[h][size_t(r - held)];
        const float* g = gradient.data() + (int64_t(h) * rows + r) * s_.dim_k;
        if (spec_.kind == KeepKind::kAsymkv && (!spec_.reread || r < held)) blend(row, Vec(g, g + s_.dim_k));
      }
      if (!spec_.reread) heads_[h].insert(heads_[h].end(), own[h].begin(), own[h].end());
    }
    reduce(spec_.reread ? begin : begin + n);
    for (size_t h = 0; spec_.reread && h < heads_.size(); ++h) {
      heads_[h].insert(heads_[h].end(), own[h].begin(), own[h].end());
    }
  }

  const std::vector<Row>& rows(int head) const { return heads_[size_t(head)]; }

 private:
  void blend(Row& row, Vec g) {
    if (spec_.before_rope) g = turned(g, -double(row.pos));
    for (size_t c = 0; row.has_g && spec_.running && c < g.size(); ++c) {
      g[c] = g[c] / chunks_ + row.g[c] * (chunks_ - 1) / chunks_;
    }
    row.g = g;
    row.has_g = true;
  }

  void give_mass(const Tokens& t, int head, int64_t begin, std::vector<Row>& own) {
    std::vector<Row>& held = heads_[size_t(head)];
    for (Row& row : held) row.mass = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      for (int g = 0; g < s_.group_size; ++g) {
        const float* q = t.q_at(s_, begin + int64_t(i)) + (int64_t(head) * s_.group_size + g) * s_.dim_k;
        std::vector<std::pair<Row*, double>> seen;
        double sum = 0;
        const auto add = [&](Row& row) {
          double z = 0;
          for (int c = 0; c < s_.dim_k; ++c) z += double(q[c]) * row.k[size_t(c)];
          seen.emplace_back(&row, std::exp(z / std::sqrt(double(s_.dim_k)) + row.bias));
          sum += seen.back().second;
        };
        for (Row& row : held) add(row);
        for (size_t j = 0; j <= i; ++j) add(own[j]);
        for (auto& [row, w] : seen) row->mass += w / sum;
      }
    }
  }

  // What a head's rows are, apart from their mass, for released weights.
  void weigh(std::vector<Row>& rows) const {
    if (spec_.kind != KeepKind::kKvslimmer) return;
    double total = 0;
    for (const Row& row : rows) total += row.fixed ? 0 : row.mass;
    Vec out(size_t(s_.dim_v), 0.0);
    for (const Row& row : rows) {
      for (size_t c = 0; !row.fixed && c < out.size(); ++c) out[c] += row.mass / total * double(row.count) * row.v[c];
    }
    for (Row& row : rows) {
      const double a = row.fixed ? 0 : row.mass / total;
      double d = 0;
      for (size_t c = 0; c < out.size(); ++c) d += std::abs(double(row.count) * row.v[c] - out[c]);
      double h = a * (1 - 2 * a) * d;
      if (row.has_g && spec_.running) h = h / chunks_ + row.h * (chunks_ - 1) / chunks_;
      row.h = h;
      row.has_g = true;
      row.g = {a};
    }
  }

  void reduce(int64_t tokens) {
    for (std::vector<Row>& rows : heads_) {
      for (size_t r = 0; r < rows.size(); ++r) {
        rows[r].fixed = int64_t(r) < spec_.sink || int64_t(r) >= int64_t(rows.size()) - spec_.window;
      }
      weigh(rows);
    }
    if (spec_.scope == KeepScope::kLayer) {
      std::vector<std::vector<Row>*> all;
      for (std::vector<Row>& rows : heads_) all.push_back(&rows);
      reduce_together(all);
    } else {
      for (std::vector<Row>& rows : heads_) reduce_together({&rows});
    }
    for (std::vector<Row>& rows : heads_) {
      int64_t pos = tokens - 1;
      for (size_t r = rows.size(); spec_.count_positions && r-- > 0;) {
        rows[r].k = turned(rows[r].k, double(pos - rows[r].pos));
        rows[r].pos = pos;
        pos -= rows[r].count;
      }
    }
  }

  void reduce_together(const std::vector<std::vector<Row>*>& heads) {
    while (int64_t(heads[0]->size()) > spec_.budget) {
      const size_t n = heads[0]->size();
      std::vector<std::pair<double, size_t>> links;
      for (size_t r = 0; r + 1 < n; ++r) {
        double mass = 0, count = 0;
        for (const auto* rows : heads) {
          mass += (*rows)[r].mass + (*rows)[r + 1].mass;
          count += double((*rows)[r].count + (*rows)[r + 1].count);
        }
        if ((*heads[0])[r].fixed || (*heads[0])[r + 1].fixed) continue;
        links.emplace_back(mass * (spec_.count_factor ? count : 1.0) / std::exp(double(r) / spec_.gamma), r);
      }
      std::sort(links.begin(), links.end());
      const bool chained = spec_.links == KeepLinks::kChained;
      size_t wanted = n - size_t(spec_.budget);
      if (!chained) wanted = std::min(wanted, n / 4);
      std::set<size_t> lefts;
      for (const auto& [score, r] : links) {
        if (lefts.size() == wanted) break;
        if (!chained && (lefts.count(r - 1) != 0 || lefts.count(r + 1) != 0)) continue;
        lefts.insert(r);
      }
      ASSERT_FALSE(lefts.empty());
      for (auto* rows : heads) {
        std::vector<Row> after;
        for (size_t r = 0; r < n; ++r) {
          if (r > 0 && lefts.count(r - 1) != 0) continue;  // the right row of a link goes, whatever became of it
          after.push_back(lefts.count(r) != 0 ? merged((*rows)[r], (*rows)[r + 1]) : (*rows)[r]);
        }
        *rows = after;
      }
    }
  }

  Row merged(const Row& a, const Row& b) const {
    Row out = a;
    const int64_t n = a.count + b.count;
    out.count = spec_.clip > 0 ? std::min(n, spec_.clip) : n;
    out.bias = std::log(double(out.count));
    out.mass = a.mass + b.mass;
    out.pos = spec_.before_rope ? b.pos : std::llround(double(a.count * a.pos + b.count * b.pos) / double(n));
    const Vec k1 = spec_.before_rope ? turned(a.k, -double(a.pos)) : a.k;
    const Vec k2 = spec_.before_rope ? turned(b.k, -double(b.pos)) : b.k;
    double share = 0.5;
    if (spec_.kind == KeepKind::kKvslimmer) {
      const double a1 = a.g[0], a2 = b.g[0];
      const double cross = a1 * a2 * (a.h / (a1 * (1 - 2 * a1)) + b.h / (a2 * (1 - 2 * a2)));
      share = (a.h - cross) / (a.h + b.h - 2 * cross);
      out.h = share * share * a.h + (1 - share) * (1 - share) * b.h;
      out.g[0] = a1 + a2;
    }
    for (size_t c = 0; c < out.k.size(); ++c) {
      if (spec_.kind == KeepKind::kAsymkv) {
        share = a.g[c] * a.g[c] / (a.g[c] * a.g[c] + b.g[c] * b.g[c]);
        out.g[c] = a.g[c] + b.g[c];
      }
      out.k[c] = share * k1[c] + (1 - share) * k2[c];
    }
    if (spec_.before_rope) out.k = turned(out.k, double(out.pos));
    for (size_t c = 0; c < out.v.size(); ++c) {
      out.v[c] = (double(a.count) * a.v[c] + double(b.count) * b.v[c]) / double(out.count);
    }
    return out;
  }

  KeepSpec spec_;
  KvShape s_;
  std::vector<std::vector<Row>> heads_;
  double chunks_ = 0;
};

// Chunks of one layer with random gradients, as the engine gives them.
class Merging : public ::testing::TestWithParam<const char*> {};

TEST_P(Merging, EveryRowEqualsTheOracles) {
  ThreadPool pool(2);
  const KvShape s = make_shape(1, 2, 3, 16, 12);
  const Recipe recipe = parse_recipe(std::string(GetParam()) + "+store=f32").value();
  const Tokens t = with_rope(s, Tokens(s, 330, 40));
  auto made =
      KvSession::create(s, recipe, {400}, plain_params(s), pool, KvSessionExtras{test_rotate(s.dim_k), nullptr});
  ASSERT_TRUE(made.ok()) << made.status().message();
  KvSession& session = **made;
  Oracle oracle(recipe.keep, s);
  constexpr int64_t kChunk = 30, kTokens = 330;
  ASSERT_NE(session.scoring(kTokens), KeepScoring::kNone);
  EXPECT_EQ(session.scoring(recipe.keep.budget), KeepScoring::kNone) << "nothing will be merged";
  Rng rng(41);
  for (int64_t begin = 0; begin < kTokens; begin += kChunk) {
    const int64_t held = session.cache().rows(0).v, rows = held + kChunk;
    KeepScore score;
    score.rows = rows;
    score.gradient = rng.normal(s.kv_heads * rows * s.dim_k);
    const std::vector<float> gradient = score.gradient;
    if (recipe.keep.reread) {  // masses as a pass over the rows held would find them
      score.mass.assign(size_t(s.kv_heads * s.group_size * rows), 0.0f);
      for (int j = 0; j < s.kv_heads * s.group_size; ++j) {
        for (int64_t i = begin; i < begin + kChunk; ++i) {
          const float* q = t.q_at(s, i) + int64_t(j) * s.dim_k;
          Vec w;
          double sum = 0;
          const auto add = [&](const auto& key, double bias) {
            double z = 0;
            for (int c = 0; c < s.dim_k; ++c) z += double(q[c]) * key[size_t(c)];
            w.push_back(std::exp(z / std::sqrt(double(s.dim_k)) + bias));
            sum += w.back();
          };
          for (const Row& row : oracle.rows(j / s.group_size)) add(row.k, row.bias);
          for (int64_t p = begin; p <= i; ++p) add(t.k_at(s, p) + int64_t(j / s.group_size) * s.dim_k, 0);
          for (size_t r = 0; r < w.size(); ++r) score.mass[size_t(j * rows) + r] += float(w[r] / sum);
        }
      }
    }
    std::vector<KeepScore> scores;
    scores.push_back(std::move(score));
    ASSERT_TRUE(session.take_scores(std::move(scores)).ok());
    std::vector<float> out(size_t(kChunk * s.kv_heads * s.group_size * s.dim_v));
    ASSERT_TRUE(
        session.prefill(0, t.q_at(s, begin), t.k_at(s, begin), t.v_at(s, begin), kChunk, kTokens, out.data(), nullptr)
            .ok());
    oracle.chunk(t, begin, kChunk, gradient);
    for (int h = 0; h < s.kv_heads; ++h) {
      const KvHeadView head = session.cache().view(0, h);
      const std::vector<Row>& expected = oracle.rows(h);
      ASSERT_EQ(head.rows, int64_t(expected.size())) << "chunk at " << begin;
      std::vector<float> k(size_t(s.dim_k)), v(size_t(s.dim_v));
      for (int64_t r = 0; r < head.rows; ++r) {
        const Row& row = expected[size_t(r)];
        ASSERT_EQ(head.count[r], row.count) << "chunk at " << begin << " row " << r;
        ASSERT_EQ(head.pos[r], row.pos) << "chunk at " << begin << " row " << r;
        ASSERT_NEAR(head.bias[r], row.bias, 1e-6);
        session.cache().read_row(0, h, r, k.data(), v.data());
        double size = 1;  // released shares are not clamped, so keys can be large
        for (const double x : row.k) size = std::max(size, std::abs(x));
        for (int c = 0; c < s.dim_k; ++c) ASSERT_NEAR(k[size_t(c)], row.k[size_t(c)], 2e-4 * size) << begin << " " << r;
        for (int c = 0; c < s.dim_v; ++c) ASSERT_NEAR(v[size_t(c)], row.v[size_t(c)], 1e-4) << begin << " " << r;
      }
    }
  }
  ASSERT_TRUE(session.finish_prefill(0).ok());
  const int64_t rows = session.cache().rows(0).v;
  EXPECT_EQ(rows, recipe.keep.budget + (recipe.keep.reread ? kChunk : 0));
  if (recipe.keep.links == KeepLinks::kChained || recipe.keep.clip > 0) return;
  int64_t tokens = 0;
  for (int64_t r = 0; r < rows; ++r) tokens += session.cache().view(0, 1).count[r];
  EXPECT_EQ(tokens, kTokens) << "no token is lost";
}

INSTANTIATE_TEST_SUITE_P(
    Options, Merging,
    ::testing::Values("asymkv:budget=80,sink=4,window=8", "asymkv:budget=80,sink=4,window=8,running=false",
                      "asymkv:budget=80,sink=4,window=0,rope=before", "asymkv:budget=80,sink=4,window=8,scope=layer",
                      "asymkv:budget=80,sink=4,window=8,clip=5", "asymkv:budget=80,sink=4,window=8,links=chained",
                      "asymkv:budget=80,sink=4,window=8,positions=count",
                      "asymkv:budget=80,sink=4,window=8,reread=true", "asymkv-release:budget=80,sink=4"));

// The same for what kvslimmer's release does, without gradients: masses come from the prompt's own attention where the
// chunk is read once.
INSTANTIATE_TEST_SUITE_P(Slimmer, Merging,
                         ::testing::Values("kvslimmer:budget=80,sink=4,window=8,norms=release,reread=true",
                                           "kvslimmer:budget=80,sink=4,window=8,norms=release,running=true,reread=true",
                                           "kvslimmer-release:budget=80,sink=4"));

// A chunk whose loss says nothing: keys are means, values stay sums.
TEST(Asymkv, WithoutAGradientKeysAreAveraged) {
  ThreadPool pool(2);
  const KvShape s = make_shape(1, 1, 2, 16, 12);
  const Tokens t(s, 60, 42);
  auto session = make_session(s, parse_recipe("asymkv:budget=59,sink=0,window=0+store=f32").value(), 60, pool);
  std::vector<float> out(size_t(60 * s.group_size * s.dim_v));
  ASSERT_TRUE(session->prefill(0, t.q_at(s, 0), t.k_at(s, 0), t.v_at(s, 0), 60, 60, out.data(), nullptr).ok());
  const KvHeadView head = session->cache().view(0, 0);
  int64_t at = -1;
  for (int64_t r = 0; r < head.rows; ++r) at = head.count[r] == 2 ? r : at;
  ASSERT_GE(at, 0);
  std::vector<float> k(16), v(12);
  session->cache().read_row(0, 0, at, k.data(), v.data());
  for (int c = 0; c < 16; ++c) EXPECT_NEAR(k[size_t(c)], (t.k_at(s, at)[c] + t.k_at(s, at + 1)[c]) / 2, 1e-6);
  for (int c = 0; c < 12; ++c) EXPECT_NEAR(v[size_t(c)], (t.v_at(s, at)[c] + t.v_at(s, at + 1)[c]) / 2, 1e-6);
}

TEST(Asymkv, WhatCannotWorkSaysWhy) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 2, 32);
  const auto refused = [&](const std::string& kv, const std::string& word, AttendParams params) {
    Result<Recipe> recipe = parse_recipe(kv);
    Status status = recipe.status();
    if (recipe.ok()) {
      status = KvSession::create(s, *recipe, {900}, params, pool, KvSessionExtras{test_rotate(32), nullptr}).status();
    }
    EXPECT_FALSE(status.ok()) << kv;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("nearest legal"), std::string::npos) << status.message();
  };
  const AttendParams plain = plain_params(s), capped{plain.scale, 50.0f};
  refused("asymkv:budget=100+store=q8_0(rotate=true)", "Hadamard", plain);
  refused("asymkv:budget=100+prefill=a_shape", "sparse prefill", plain);
  refused("asymkv:budget=100", "capped", capped);
  refused("asymkv:budget=60", "leaves no row", plain);
  refused("asymkv:budget=100,clip=5,bias=entropy", "clip=5", plain);
  refused("kvslimmer:budget=100,running=true", "norms=release", plain);
  refused("kvslimmer:budget=100,running=true,key_weight=norm", "key_weight=slimmer", plain);
  refused("kvslimmer:budget=100,bias=fit,rope=before", "rope=after", plain);
  refused("normmass:budget=100,norms=release", "key_weight=slimmer", plain);
  // And what needs no gradient of capped scores is not refused.
  EXPECT_TRUE(KvSession::create(s, parse_recipe("kvslimmer:budget=100").value(), {900}, capped, pool).ok());
}

}  // namespace
}  // namespace longkv::test
