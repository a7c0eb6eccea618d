// The recordings of kvpress contradict neither themselves nor the package's own arithmetic, and compare_kept sees a row
// that is wrong.
#include "support/kvpress_golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace longkv::test {
namespace {

using Lists = std::vector<std::vector<std::vector<int64_t>>>;

Lists lists_of(const KvpressCut& cut) {
  Lists all;
  for (const auto& layer : cut.heads) {
    auto& heads = all.emplace_back();
    for (const KvpressHead& head : layer) {
      auto& rows = heads.emplace_back();
      for (size_t i = 0; i < head.kept.size(); ++i) {
        if (head.kept[i]) rows.push_back(int64_t(i));
      }
    }
  }
  return all;
}

template <class Visit>
void visit_cuts(const Visit& visit) {
  for (const char* name : {"llama", "qwen3", "smollm2-q4_1"}) {
    const KvpressGolden golden = load_kvpress(name);
    for (const KvpressCase& c : golden.cases) {
      for (const KvpressRecord& record : c.records) {
        for (const KvpressCut& cut : record.cuts) visit(golden, c, record, cut);
      }
    }
  }
}

TEST(KvpressGolden, KeepsAsManyAsTheRatioSays) {
  visit_cuts([](const KvpressGolden& g, const KvpressCase& c, const KvpressRecord& record, const KvpressCut& cut) {
    if (record.press == "PyramidKVPress") return;  // by layer
    const auto n = int64_t(c.ids.size());
    int64_t total = 0, units = 0;
    for (const auto& layer : lists_of(cut)) {
      int64_t in_layer = 0;
      for (const auto& head : layer) {
        units += record.channels ? g.head_dim : n;
        in_layer += int64_t(head.size());
        if (record.share == KvpressShare::kHead) {
          const int64_t want = record.channels ? g.head_dim - int64_t(double(g.head_dim) * cut.ratio)
                                               : int64_t(double(n) * (1 - cut.ratio));
          EXPECT_EQ(int64_t(head.size()), want) << c.name << " " << record.name << " " << cut.ratio;
        }
      }
      if (record.press == "AdaKVPress") {
        EXPECT_EQ(in_layer, g.kv_heads * int64_t(double(n) * (1 - cut.ratio))) << c.name << " " << record.name;
      }
      total += in_layer;
    }
    if (record.share == KvpressShare::kModel && c.all_layers) {
      EXPECT_EQ(total, units - int64_t(double(units) * cut.ratio)) << c.name << " " << record.name << " " << cut.ratio;
    }
  });
}

TEST(KvpressGolden, KeptScoresLieAboveDroppedOnes) {
  int64_t heads = 0, near = 0, all = 0;
  visit_cuts([&](const KvpressGolden&, const KvpressCase& c, const KvpressRecord& record, const KvpressCut& cut) {
    for (const auto& layer : cut.heads) {
      for (const KvpressHead& head : layer) {
        ++heads;
        near += int64_t(head.near.size());
        all += int64_t(head.kept.size());
        if (std::isnan(head.noise) || !std::isfinite(head.worst_kept) || !std::isfinite(head.best_dropped)) continue;
        EXPECT_GE(head.worst_kept, head.best_dropped) << c.name << " " << record.name << " " << cut.ratio;
      }
    }
  });
  EXPECT_GT(heads, 4000);
  EXPECT_LT(double(near), 0.005 * double(all)) << "so many near-ties that a comparison means little";
}

TEST(KvpressGolden, ComparisonAcceptsTheRecordingAndNothingElse) {
  visit_cuts([](const KvpressGolden&, const KvpressCase& c, const KvpressRecord& record, const KvpressCut& cut) {
    Lists lists = lists_of(cut);
    EXPECT_EQ(compare_kept(c, record, cut, lists).wrong, "");
    const KvpressHead& head = cut.heads[0][0];
    auto& rows = lists[0][0];
    // A clear row out, a clear one in: the counts stay right.
    const auto clear = [&](int64_t i) { return !std::binary_search(head.near.begin(), head.near.end(), int32_t(i)); };
    const auto out = std::find_if(rows.begin(), rows.end(), clear);
    int64_t in = 0;
    while (size_t(in) < head.kept.size() && (head.kept[size_t(in)] || !clear(in))) ++in;
    if (out == rows.end() || size_t(in) == head.kept.size()) return;  // a head kept or dropped as a whole
    *out = in;
    std::sort(rows.begin(), rows.end());
    EXPECT_NE(compare_kept(c, record, cut, lists).wrong, "") << c.name << " " << record.name << " " << cut.ratio;
    rows.pop_back();
    EXPECT_NE(compare_kept(c, record, cut, lists).wrong, "") << c.name << " " << record.name << " " << cut.ratio;
  });
}

}  // namespace
}  // namespace longkv::test
