// FastGen against its definition in double: the policy of each head, the rows that it keeps, and what tokens change.
#include <gtest/gtest.h>

#include "kv_keep/oracle.h"

namespace longkv::test {
namespace {

TokenClass class_of(int64_t pos) {
  return pos % 17 == 0 ? TokenClass::kSpecial : pos % 5 == 0 ? TokenClass::kPunctuation : TokenClass::kOther;
}

int level_of(int64_t pos, int64_t sink) {
  if (pos < sink) return 1;
  return class_of(pos) == TokenClass::kSpecial ? 1 : class_of(pos) == TokenClass::kPunctuation ? 2 : 5;
}

// One head: accumulated mass by held position.
struct HeadOracle {
  std::map<int64_t, double> mass;
  int policy = 0;
  int64_t budget = 0, local = 0;

  Positions held() const {
    Positions p;
    for (const auto& [pos, m] : mass) p.push_back(pos);
    return p;
  }
  void keep(const std::set<int64_t>& rows) {
    std::erase_if(mass, [&](const auto& m) { return rows.count(m.first) == 0; });
  }
};

void see(const KvShape& s, const Tokens& t, int h, int64_t token, HeadOracle& head) {
  const Positions held = head.held();
  for (int g = 0; g < s.group_size; ++g) {
    for (const auto& [p, w] : weights_of(s, t, token, h * s.group_size + g, held)) head.mass[p] += w;
  }
}

void choose(const KvShape& s, const Tokens& t, int h, int64_t from, int64_t n, const KeepSpec& spec, HeadOracle& head) {
  const Positions held = head.held();
  // Heavy hitters among what no class keeps.
  std::vector<double> score;
  int64_t open = 0;
  for (const int64_t p : held) {
    const bool other = level_of(p, spec.sink) > 2;
    score.push_back(other ? head.mass[p] / double(n - p) : -1.0);
    open += other ? 1 : 0;
  }
  const Positions heavy = best_of(held, score, {}, std::min(open, int64_t(spec.heavy * double(n))));
  const auto level = [&](int64_t p) {
    const int l = level_of(p, spec.sink);
    return l > 2 && std::binary_search(heavy.begin(), heavy.end(), p) ? 3 : l;
  };
  std::vector<double> recover(5, 0.0);
  for (int64_t i = from; i < n; ++i) {
    for (int g = 0; g < s.group_size; ++g) {
      for (const auto& [p, w] : weights_of(s, t, i, h * s.group_size + g, held)) {
        for (int policy = 1; policy <= 4; ++policy) {
          const bool near = policy == 4 && double(i - p) < spec.local * double(n);
          if (level(p) <= policy || near) recover[size_t(policy)] += w;
        }
      }
    }
  }
  head.policy = 5;
  for (int policy = 4; policy >= 1; --policy) {
    if (recover[size_t(policy)] / double((n - from) * s.group_size) >= spec.recovery) head.policy = policy;
  }
  head.local = int64_t(spec.local * double(n));
  const auto newest = ends(held, 0, head.policy == 4 ? head.local : 0);
  std::set<int64_t> kept;
  for (const int64_t p : held) {
    if (head.policy == 5 || level(p) <= head.policy || newest.count(p) != 0) kept.insert(p);
  }
  head.keep(kept);
  head.budget = int64_t(kept.size());
}

void step(const KvShape& s, const Tokens& t, int h, int64_t token, const KeepSpec& spec, HeadOracle& head) {
  head.mass[token] = 0;
  if (head.policy == 5) return;
  see(s, t, h, token, head);
  if (head.policy <= 2) {
    if (level_of(token, spec.sink) > head.policy) head.mass.erase(token);
    return;
  }
  if (int64_t(head.mass.size()) <= head.budget) return;
  const auto newest = ends(head.held(), 0, head.policy == 4 ? head.local : 0);
  int64_t worst = -1;
  double least = INFINITY;
  for (const auto& [p, m] : head.mass) {
    if (newest.count(p) != 0 || level_of(p, spec.sink) <= 2) continue;
    if (m / double(token + 1 - p) < least) {
      least = m / double(token + 1 - p);
      worst = p;
    }
  }
  if (worst >= 0) head.mass.erase(worst);
}

TEST(Fastgen, EachHeadGetsTheCheapestPolicyThatRecoversEnough) {
  ThreadPool pool(2);
  const KvShape s = make_shape(1, 6, 2, 16);
  Tokens t(s, 200, 70);
  // What heads look at: special tokens, punctuation, a few heavy rows, neighbours, everything.
  const int64_t width = s.kv_heads * s.dim_k, q_width = width * s.group_size;
  for (int64_t i = 0; i < 200; ++i) {
    for (int h = 0; h < 6; ++h) {
      float* k = t.k.data() + i * width + h * s.dim_k;
      const bool liked = (h == 0 && level_of(i, 4) == 1) || (h == 1 && level_of(i, 4) <= 2) || (h == 2 && i % 7 == 3);
      for (int c = 0; c < s.dim_k; ++c) k[c] *= 0.3f;
      if (liked) k[0] += 8;
      if (h == 3) {  // near rows: a slowly turning direction
        k[1] = 9 * std::cos(0.05f * float(i));
        k[2] = 9 * std::sin(0.05f * float(i));
      }
      for (int g = 0; g < s.group_size; ++g) {
        float* q = t.q.data() + i * q_width + (h * s.group_size + g) * s.dim_k;
        for (int c = 0; c < s.dim_k; ++c) q[c] *= 0.3f;
        if (h < 3) q[0] += 4;
        if (h == 3) {
          q[1] = 9 * std::cos(0.05f * float(i));
          q[2] = 9 * std::sin(0.05f * float(i));
        }
      }
    }
  }
  const Recipe recipe = parse_recipe("fastgen:recovery=0.9,heavy=0.15,local=0.12+store=f32").value();
  auto session = make_session(s, recipe, 512, pool);
  std::vector<TokenClass> classes;
  for (int64_t i = 0; i < 120; ++i) classes.push_back(class_of(i));
  session->note_classes(classes);
  feed_prompt(*session, t, 0, 120, 50);
  std::vector<HeadOracle> heads(6);
  std::set<int> policies;
  const auto prompt = [&](int64_t from, int64_t n) {
    for (int h = 0; h < 6; ++h) {
      for (int64_t p = from; p < n; ++p) heads[size_t(h)].mass[p] = 0;
      for (int64_t i = from; i < n; ++i) see(s, t, h, i, heads[size_t(h)]);
      choose(s, t, h, from, n, recipe.keep, heads[size_t(h)]);
      policies.insert(heads[size_t(h)].policy);
      EXPECT_EQ(sorted_positions(*session, 0, h), heads[size_t(h)].held()) << "head " << h;
    }
  };
  prompt(0, 120);
  EXPECT_EQ(policies, (std::set<int>{1, 2, 3, 4, 5})) << "the case has a head for every policy";
  for (int64_t i = 120; i < 150; ++i) {
    const TokenClass kind = class_of(i);
    session->note_classes({&kind, 1});
    decode_token(*session, t, i);
    for (int h = 0; h < 6; ++h) {
      step(s, t, h, i, recipe.keep, heads[size_t(h)]);
      ASSERT_EQ(sorted_positions(*session, 0, h), heads[size_t(h)].held()) << "head " << h << " token " << i;
    }
  }
  classes.clear();
  for (int64_t i = 150; i < 190; ++i) classes.push_back(class_of(i));
  session->note_classes(classes);
  feed_prompt(*session, t, 150, 190, 40);
  prompt(150, 190);
}

TEST(Fastgen, FullRecoveryIsFull) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 2, 2, 32);
  const Tokens t(s, 100, 71);
  auto full = make_session(s, full_f32(), 512, pool);
  auto kept = make_session(s, parse_recipe("fastgen:recovery=1,heavy=0,local=0+store=f32").value(), 512, pool);
  EXPECT_EQ(feed_prompt(*full, t, 0, 60, 25), feed_prompt(*kept, t, 0, 60, 25));
  EXPECT_EQ(decode_token(*full, t, 60), decode_token(*kept, t, 60));
}

}  // namespace
}  // namespace longkv::test
