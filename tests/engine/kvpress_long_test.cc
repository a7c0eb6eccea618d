// Rows that our keep stages keep of a prompt of a thousand tokens, against NVIDIA's kvpress on SmolLM2.
//
// The prompt passes the model once; what reaches the recorded layers is written down and then given to the KV side
// alone, once per recipe and in chunks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "engine/session.h"
#include "kv/keep/keep.h"
#include "model/rope.h"
#include "support/kvpress_golden.h"
#include "support/kvpress_recipe.h"
#include "support/paths.h"

namespace longkv {
namespace {

using test::KvpressCase;
using test::KvpressCut;
using test::KvpressRecord;
using Lists = std::vector<std::vector<std::vector<int64_t>>>;

struct LayerRows {
  std::vector<float> q, k, v;  // [tokens][heads][dim]
};

// Keeps every row and writes down what the layer saw. Rows are stored in fp32.
class RecordingKeeper : public Keeper {
 public:
  RecordingKeeper(int64_t tokens, std::vector<LayerRows>& layers) : tokens_(tokens), layers_(layers) {}
  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.last_queries = tokens_;
    return needs;
  }
  Status choose(const KeepInput& input, KeepChoice& choice) override {
    LayerRows& to = layers_[size_t(input.layer)];
    to.q = input.queries->q;
    const auto heads = int64_t(input.heads.size());
    for (int64_t h = 0; h < heads; ++h) {
      const KvHeadView& head = input.heads[size_t(h)];
      to.k.resize(size_t(head.rows * heads * head.dim_k));
      to.v.resize(size_t(head.rows * heads * head.dim_v));
      for (int64_t r = 0; r < head.rows; ++r) {
        std::memcpy(to.k.data() + (r * heads + h) * head.dim_k, head.k + r * head.k_stride, size_t(head.dim_k) * 4);
        std::memcpy(to.v.data() + (r * heads + h) * head.dim_v, head.v + r * head.v_stride, size_t(head.dim_v) * 4);
        choice.rows[size_t(h)].push_back(r);
      }
    }
    return {};
  }
  int64_t planned_rows(int, int, int64_t tokens) const override { return tokens; }

 private:
  int64_t tokens_;
  std::vector<LayerRows>& layers_;
};

Recipe fp32_recipe(const std::string& keep) {
  auto recipe = parse_recipe(keep + " + store=f32");
  EXPECT_TRUE(recipe.ok()) << keep << ": " << recipe.status().message();
  return recipe.ok() ? *recipe : Recipe{};
}

std::vector<LayerRows> record_layers(const std::shared_ptr<const LoadedModel>& model, const KvpressCase& c,
                                     ThreadPool& pool) {
  std::vector<LayerRows> layers(size_t(model->config().layers));
  SessionOptions options;
  options.context = int64_t(c.ids.size());
  options.products = ProductType::kF32;
  options.recipe = fp32_recipe("keep=all");
  options.keeper = [&] { return std::make_unique<RecordingKeeper>(options.context, layers); };
  auto session = Session::create(model, options, pool);
  EXPECT_TRUE(session.ok()) << session.status().message();
  if (session.ok()) {
    EXPECT_TRUE((*session)->prefill(c.ids).ok());
  }
  return layers;
}

Lists replay(const LoadedModel& model, const KvpressCase& c, const std::vector<LayerRows>& layers,
             const std::string& keep, ThreadPool& pool) {
  const ModelConfig& config = model.config();
  const KvShape shape = config.kv_shape();
  const auto n = int64_t(c.ids.size());
  auto table = std::make_shared<RopeTable>(model.rope_for(n), 1);
  KvSessionExtras extras;
  extras.rotate = [table](int, double delta, float* rows, int64_t count, int64_t stride) {
    turn_rows(*table, delta, rows, count, stride);
  };
  auto made = KvSession::create(shape, fp32_recipe(keep), {n}, {config.attn_scale, config.attn_softcap}, pool,
                                std::move(extras));
  EXPECT_TRUE(made.ok()) << made.status().message();
  if (!made.ok()) return {};
  KvSession& kv = **made;
  const int64_t kv_heads = shape.kv_heads, q_size = kv_heads * shape.group_size * shape.dim_k;
  std::vector<float> out(size_t(n * kv_heads * shape.group_size * shape.dim_v));
  Lists kept;
  for (const int layer : c.layers) {
    const LayerRows& rows = layers[size_t(layer)];
    constexpr int64_t kChunk = 192;
    for (int64_t at = 0; at < n; at += kChunk) {
      const Status s =
          kv.prefill(layer, rows.q.data() + at * q_size, rows.k.data() + at * kv_heads * shape.dim_k,
                     rows.v.data() + at * kv_heads * shape.dim_v, std::min(kChunk, n - at), n, out.data(), nullptr);
      EXPECT_TRUE(s.ok()) << s.message();
    }
    EXPECT_TRUE(kv.finish_prefill(layer).ok());
    auto& heads = kept.emplace_back();
    for (int h = 0; h < kv_heads; ++h) heads.push_back(kv.kept_positions(layer, h));
  }
  return kept;
}

TEST(KvpressLong, SmolLM2KeepsTheSameRows) {
  const test::KvpressGolden golden = test::load_kvpress("smollm2-q4_1");
  const std::string path = test::fetched_model(golden.model);
  if (path.empty()) GTEST_SKIP() << golden.model << " is not there; scripts/fetch_models brings it";
  auto model = LoadedModel::load(path);
  ASSERT_TRUE(model.ok()) << model.status().message();
  ThreadPool pool(2);
  const auto c = std::find_if(golden.cases.begin(), golden.cases.end(), [](const auto& x) { return x.name == "long"; });
  ASSERT_NE(c, golden.cases.end());
  const auto n = int64_t(c->ids.size());
  const std::vector<LayerRows> layers = record_layers(*model, *c, pool);
  std::set<std::string> seen;
  for (const KvpressRecord& record : c->records) {
    for (const KvpressCut& cut : record.cuts) {
      const std::string keep = test::kvpress_keep(record, cut, n);
      if (keep.empty() || !record.repeat_ids.empty()) continue;
      const auto difference = compare_kept(*c, record, cut, replay(**model, *c, layers, keep, pool));
      EXPECT_EQ(difference.wrong, "");
      std::printf("%-26s without %.2f: %lld rows compared, %lld near-ties decided otherwise\n", record.name.c_str(),
                  cut.ratio, static_cast<long long>(difference.compared), static_cast<long long>(difference.ties));
      seen.insert(record.name);
    }
  }
  EXPECT_EQ(seen, (std::set<std::string>{"streaming", "tova", "snapkv", "pyramidkv", "observed_attention",
                                         "expected_attention", "keydiff", "knorm", "adakv_snapkv",
                                         "adakv_expected_attention"}));
}

}  // namespace
}  // namespace longkv
