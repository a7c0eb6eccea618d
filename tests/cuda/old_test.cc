// Encoded rows on the card against the CPU's codec, and attention over them against double precision.
#include "cuda/old.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cuda/card.h"
#include "kv/codec/kivi.h"

namespace longkv {
namespace {

using card::CardKv;
using test::OnCard;

struct Case {
  KvType type;
  int heads, kv_heads, dim;
  int64_t rows, sink, window;
  int kept;  // channels of the first KV head; those after it have all, the last one none where this is below dim
  bool mean = false;
  double cap = 0;
};

// One layer with its encoded rows and all raw ones, on the card and here.
struct Layer {
  explicit Layer(const Case& the_case)
      : c(the_case),
        end(card::old_end(c.rows, c.sink, c.window)),
        ring(card::old_ring(c.window)),
        capacity((c.rows + 63) / 16 * 16),
        raw_memory(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, capacity)),
        ring_memory(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, c.sink + ring)),
        middle_memory(c.kv_heads * card::old_steps(capacity, c.sink) * 2 * card::old_step_bytes(c.type, c.dim)),
        mask_memory(c.kv_heads * per_head()),
        head_memory(c.kv_heads * int64_t(sizeof(card::OldHead))),
        end_memory(16) {
    raw = card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, raw_memory.data());
    kept = card::place_kv(KvType::kF16, c.kv_heads, c.dim, c.sink + ring, ring_memory.data());
    kept.fixed = c.sink, kept.ring = ring;
    OnCard::check(cudaMemset(mask_memory.data(), 0, size_t(c.kv_heads * per_head())));
    std::vector<card::OldHead> heads;
    const int64_t steps = card::old_steps(capacity, c.sink), step = card::old_step_bytes(c.type, c.dim);
    for (int h = 0; h < c.kv_heads; ++h) {
      card::OldHead head;
      head.channels = channels_of(h);
      head.kept = card::old_kept(head.channels);
      head.k = middle_memory.data() + h * steps * 2 * step;
      head.v = head.k + steps * step;
      std::vector<uint16_t> list;
      std::vector<float> factors;
      for (int i = 0; i < head.channels; ++i) {
        list.push_back(uint16_t(masked() ? i * c.dim / head.channels : i));
        factors.push_back(masked() ? 1.0f + 0.01f * float(i % 7) : 1.0f);
      }
      uint8_t* at = mask_memory.data() + h * per_head();
      if (masked()) {
        head.sums = reinterpret_cast<double*>(at);
        auto* floats = reinterpret_cast<float*>(at + 16 * c.dim);
        head.mean_k = c.mean || head.channels == 0 ? floats : nullptr;
        head.mean_v = head.channels == 0 ? floats + c.dim : nullptr;
        auto* alpha = floats + 2 * c.dim;
        auto* channel = reinterpret_cast<uint16_t*>(alpha + c.dim);
        copy(alpha, factors);
        copy(channel, list);
        if (head.channels > 0) head.alpha = alpha, head.channel = channel;
      }
      channels.push_back(list);
      alphas.push_back(factors);
      heads.push_back(head);
    }
    copy(head_memory.as<card::OldHead>(), heads);
    copy(end_memory.as<int64_t>(), std::vector<int64_t>{end});
    old = {c.type, c.kv_heads, c.dim, c.sink, c.window, end_memory.as<int64_t>(), head_memory.as<card::OldHead>()};
  }
  bool masked() const { return c.kept < c.dim; }
  int channels_of(int h) const { return !masked() ? c.dim : h == 0 ? c.kept : h == c.kv_heads - 1 ? 0 : c.dim; }
  int64_t per_head() const { return c.dim * 32; }
  template <class T>
  static void copy(T* to, const std::vector<T>& from) {
    OnCard::check(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  // K (first) and V of all rows in f16, [2][kv_heads][capacity][dim].
  std::vector<double> read(const OnCard& memory) const {
    std::vector<double> all;
    for (const uint16_t x : memory.read<uint16_t>(2 * c.kv_heads * capacity * c.dim))
      all.push_back(test::half_float(x));
    return all;
  }
  const double* row(const std::vector<double>& all, bool key, int h, int64_t r) const {
    return all.data() + (((key ? 0 : c.kv_heads) + h) * capacity + r) * c.dim;
  }

  Case c;
  int64_t end, ring, capacity;
  OnCard raw_memory, ring_memory, middle_memory, mask_memory, head_memory, end_memory;
  CardKv raw, kept;
  card::CardOld old;
  std::vector<std::vector<uint16_t>> channels;
  std::vector<std::vector<float>> alphas;
};

const std::vector<Case> kCases = {
    {KvType::kKivi4, 8, 2, 128, 1000, 0, 128, 128},     {KvType::kKivi2, 8, 2, 128, 777, 16, 64, 128},
    {KvType::kKivi4, 7, 1, 64, 333, 32, 0, 64},         {KvType::kKivi2, 4, 1, 256, 500, 0, 32, 256},
    {KvType::kKivi2, 6, 2, 64, 500, 0, 32, 64},         {KvType::kKivi4, 20, 1, 256, 300, 0, 32, 256, false, 30},
    {KvType::kF16, 12, 3, 128, 900, 128, 96, 40},       {KvType::kKivi4, 12, 3, 128, 900, 16, 96, 72, true},
    {KvType::kKivi2, 12, 3, 128, 900, 16, 96, 90},      {KvType::kF16, 6, 3, 64, 400, 0, 32, 31, true},
    {KvType::kKivi2, 3, 3, 256, 400, 0, 32, 192, true}, {KvType::kKivi2, 4, 1, 128, 3700, 16, 64, 128},
    {KvType::kKivi4, 18, 2, 128, 1500, 0, 32, 128},     {KvType::kKivi4, 3, 3, 256, 700, 0, 32, 32, true},
    {KvType::kKivi4, 5, 1, 128, 100, 0, 32, 128}};

testing::Message name_of(const Case& c) {
  return testing::Message() << kv_type_name(c.type) << ' ' << c.heads << '/' << c.kv_heads << " x " << c.dim << ", "
                            << c.rows << " rows, " << c.kept << " channels";
}

TEST(CardOld, ReadsBackAsTheCpuEncodes) {
  LONGKV_NEED_CARD();
  for (const Case& c : kCases) {
    SCOPED_TRACE(name_of(c));
    Layer l(c);
    ASSERT_DONE(card::fill_rows(l.raw, c.rows, 5, nullptr));
    const auto raw = l.read(l.raw_memory);
    // Most rows as a prompt's, the last steps as decoded tokens complete them.
    const int64_t early = std::max(c.sink, l.end - 64);
    ASSERT_DONE(card::encode_old(l.old, l.raw, c.sink, early, nullptr));
    ASSERT_DONE(card::add_means(l.old, l.raw, c.sink, early, nullptr));
    const std::vector<card::OldLayer> list = {{l.raw, l.old}};
    const OnCard layers = OnCard::of(list);
    int64_t end = early;
    for (int64_t rows = early + c.window + 1; rows <= c.rows; ++rows) {
      const OnCard position = OnCard::of(std::vector<int64_t>{rows - 1});
      Layer::copy(l.end_memory.as<int64_t>(), std::vector<int64_t>{end});
      ASSERT_DONE(card::encode_last(layers.as<card::OldLayer>(), 1, c.kv_heads, c.type, l.masked(),
                                    position.as<int64_t>(), nullptr));
      OnCard::check(cudaDeviceSynchronize());
      end = std::max(end, card::old_end(rows, c.sink, c.window));
    }
    ASSERT_EQ(end, l.end);
    ASSERT_DONE(card::copy_rows(l.raw, 0, c.sink, l.kept, nullptr));
    ASSERT_DONE(card::copy_rows(l.raw, l.end, c.rows, l.kept, nullptr));
    const OnCard back(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, l.capacity));
    const CardKv to = card::place_kv(KvType::kF16, c.kv_heads, c.dim, l.capacity, back.data());
    ASSERT_DONE(card::read_old(l.old, l.kept, 0, c.rows, l.end, to, nullptr));
    const auto got = l.read(back);

    const int dim = c.dim;
    for (int h = 0; h < c.kv_heads; ++h) {
      const auto& channels = l.channels[size_t(h)];
      // Means of what is lost.
      std::vector<double> mean_k(size_t(dim), 0.0), mean_v(size_t(dim), 0.0);
      for (int64_t r = c.sink; r < l.end; ++r) {
        for (int i = 0; i < dim; ++i) {
          mean_k[size_t(i)] += l.row(raw, true, h, r)[i] / double(l.end - c.sink);
          mean_v[size_t(i)] += l.row(raw, false, h, r)[i] / double(l.end - c.sink);
        }
      }
      for (size_t i = 0; i < channels.size(); ++i) mean_k[channels[i]] *= 1 - double(l.alphas[size_t(h)][i]);
      const bool shifted = l.masked() && (c.mean || channels.empty());
      for (int64_t r = 0; r < c.rows; ++r) {
        std::vector<double> k(l.row(raw, true, h, r), l.row(raw, true, h, r) + dim);
        std::vector<double> v(l.row(raw, false, h, r), l.row(raw, false, h, r) + dim);
        if (r >= c.sink && r < l.end) {
          const int64_t first = c.sink + (r - c.sink) / 32 * 32;
          const auto n = int64_t(channels.size());
          std::vector<float> keys, values;
          for (int64_t s = first; s < first + 32; ++s) {
            for (uint16_t i : channels) keys.push_back(float(l.row(raw, true, h, s)[i]));
            for (int i = 0; i < dim; ++i) values.push_back(float(l.row(raw, false, h, s)[i]));
          }
          std::vector<float> key(size_t(n) + 8), value(static_cast<size_t>(dim));
          for (int64_t i = 0; i < n; ++i) key[size_t(i)] = keys[size_t((r - first) * n + i)];
          for (int i = 0; i < dim; ++i) value[size_t(i)] = values[size_t((r - first) * dim + i)];
          if (c.type != KvType::kF16 && n > 0) {
            // The codec wants channels in eights: columns of zeros fill them up.
            const int64_t wide = (n + 7) / 8 * 8;
            std::vector<float> filled(size_t(32 * wide), 0.0f);
            for (int64_t s = 0; s < 32; ++s) std::copy_n(keys.begin() + s * n, n, filled.begin() + s * wide);
            std::vector<uint8_t> block(size_t(kivi_block_bytes(c.type, std::max<int64_t>(wide, dim))));
            kivi_encode_keys(c.type, filled.data(), wide, wide, block.data());
            key.resize(size_t(wide));
            kivi_decode_key(c.type, block.data(), r - first, wide, key.data());
            kivi_encode_values(c.type, values.data(), dim, dim, block.data());
            kivi_decode_value(c.type, block.data(), r - first, dim, value.data());
          }
          std::fill(k.begin(), k.end(), 0.0);
          for (size_t i = 0; i < channels.size(); ++i) k[channels[i]] = double(key[i]) * double(l.alphas[size_t(h)][i]);
          for (int i = 0; shifted && i < dim; ++i) k[size_t(i)] += mean_k[size_t(i)];
          v.assign(value.begin(), value.end());
          if (channels.empty()) v = mean_v;
        }
        for (int i = 0; i < dim; ++i) {
          // Halves; a factor's and a mean's rounding.
          ASSERT_NEAR(l.row(got, true, h, r)[i], k[size_t(i)], 1.2e-3 * (std::abs(k[size_t(i)]) + 0.1))
              << "key " << h << ' ' << r << ' ' << i;
          ASSERT_NEAR(l.row(got, false, h, r)[i], v[size_t(i)], 1.2e-3 * (std::abs(v[size_t(i)]) + 0.1))
              << "value " << h << ' ' << r << ' ' << i;
        }
      }
    }
    // Cut to fewer rows: means stay, sums shrink with them.
    ASSERT_DONE(card::cut_means(l.old, l.end - c.sink, 64, nullptr));
    OnCard::check(cudaDeviceSynchronize());
  }
}

// Attention over a layer in which rows of values are `of_values` (normal + mean), by so many pieces of work, against
// double precision over the rows as they read back. `listed`: over a list whose tiles lie in either part, some of them
// partly. allowed(norm of the result, root of the sum over rows of squares of what each adds). Returns the largest
// share of what is allowed.
double expect_attention(const Case& c, bool listed, float of_values, float mean, int raw_splits, int old_splits,
                        const std::function<double(double, double)>& allowed) {
  double worst = 0;
  Layer l(c);
  EXPECT_DONE(card::fill_rows(l.raw, c.rows, 6, nullptr));
  if (of_values != 1.0f || mean != 0.0f) {
    const int64_t half = c.kv_heads * l.capacity * c.dim;
    auto rows = l.raw_memory.read<uint16_t>(2 * half);
    for (int64_t i = half; i < 2 * half; ++i)
      rows[size_t(i)] = to_f16((test::half_float(rows[size_t(i)]) + mean) * of_values).bits;
    Layer::copy(l.raw_memory.as<uint16_t>(), rows);
  }
  EXPECT_DONE(card::encode_old(l.old, l.raw, c.sink, l.end, nullptr));
  EXPECT_DONE(card::add_means(l.old, l.raw, c.sink, l.end, nullptr));
  EXPECT_DONE(card::copy_rows(l.raw, 0, c.sink, l.kept, nullptr));
  EXPECT_DONE(card::copy_rows(l.raw, l.end, c.rows, l.kept, nullptr));
  const OnCard back(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, l.capacity));
  const CardKv to = card::place_kv(KvType::kF16, c.kv_heads, c.dim, l.capacity, back.data());
  EXPECT_DONE(card::read_old(l.old, l.kept, 0, c.rows, l.end, to, nullptr));
  const auto rows = l.read(back);
  std::vector<bool> seen(size_t(c.rows), !listed);
  std::vector<int32_t> tiles;
  int32_t count = 0;
  for (int64_t t = 0; listed && t * 16 < c.rows; t += 3) {
    const int64_t first = t * 16 + (t % 2 == 0 ? 0 : 5), last = std::min(c.rows, t * 16 + 16);
    if (first >= last) continue;
    tiles.push_back(int32_t(first)), tiles.push_back(int32_t(last - first));
    ++count;
    std::fill(seen.begin() + first, seen.begin() + last, true);
  }
  const int64_t stride = std::max<int64_t>(1, count);
  std::vector<int32_t> all_tiles;
  for (int h = 0; h < c.kv_heads; ++h) all_tiles.insert(all_tiles.end(), tiles.begin(), tiles.end());
  all_tiles.insert(all_tiles.end(), size_t(c.kv_heads), count);
  const OnCard list_memory = OnCard::of(all_tiles);
  card::TileList list;
  if (listed)
    list = {list_memory.as<int32_t>(), list_memory.as<int32_t>() + 2 * c.kv_heads * stride, stride, false, nullptr};

  const auto queries = test::to_halves(test::normal_floats(c.heads * c.dim, 9));
  const OnCard q = OnCard::of(queries), gathered(c.heads * c.dim * 2), shift(c.heads * 4);
  const int splits = raw_splits + old_splits;
  const OnCard partials(card::DecodeScratch::bytes(c.heads, splits, c.dim)), out(card::CardRow::bytes(c.heads * c.dim));
  card::DecodeScratch raw{raw_splits, partials.as<float>(), partials.as<float>() + int64_t(c.heads) * splits * c.dim, 0,
                          splits};
  card::DecodeScratch old = raw;
  old.splits = old_splits, old.first = raw_splits;
  const OnCard position = OnCard::of(std::vector<int64_t>{c.rows - 1});
  const auto scale = float(1 / std::sqrt(double(c.dim)));
  const card::AttendArgs a{q.as<card::half_t>(), c.heads, l.kept, scale, float(c.cap), 0, l.old.end};
  card::AttendOldArgs b{q.as<card::half_t>(), nullptr, c.heads, l.old, scale, float(c.cap)};
  if (l.masked()) {
    EXPECT_DONE(card::gather_queries(q.as<card::half_t>(), c.heads, l.old, scale, gathered.as<card::half_t>(),
                                     shift.as<float>(), nullptr));
    b.q = gathered.as<card::half_t>(), b.shift = shift.as<float>();
  }
  EXPECT_DONE(card::attend_token(a, list, position.as<int64_t>(), raw, nullptr));
  EXPECT_DONE(card::attend_old(b, list, old, nullptr));
  EXPECT_DONE(card::merge_partials(old, c.heads, c.dim, card::CardRow::at(out.data(), c.heads * c.dim), nullptr));
  const auto got = out.read<float>(c.heads * c.dim);
  const int group = c.heads / c.kv_heads;
  for (int h = 0; h < c.heads; ++h) {
    std::vector<double> want(size_t(c.dim), 0.0);
    double sum = 0, squares = 0, error = 0, norm = 0;
    for (int64_t r = 0; r < c.rows; ++r) {
      if (!seen[size_t(r)]) continue;
      double dot = 0;
      for (int i = 0; i < c.dim; ++i)
        dot += test::half_float(queries[size_t(h * c.dim + i)]) * l.row(rows, true, h / group, r)[i];
      dot *= scale;
      if (c.cap > 0) dot = c.cap * std::tanh(dot / c.cap);
      const double w = std::exp(dot);
      sum += w;
      for (int i = 0; i < c.dim; ++i) {
        const double x = w * l.row(rows, false, h / group, r)[i];
        want[size_t(i)] += x, squares += x * x;
      }
    }
    for (int i = 0; i < c.dim; ++i) {
      const double x = want[size_t(i)] / sum, y = got[size_t(h * c.dim + i)];
      EXPECT_TRUE(std::isfinite(y));
      error += (x - y) * (x - y), norm += x * x;
    }
    const double part = std::sqrt(error) / allowed(std::sqrt(norm), std::sqrt(squares) / sum);
    EXPECT_LE(part, 1.0) << "head " << h;
    worst = std::max(worst, part);
  }
  return worst;
}

TEST(CardOld, AttentionAsInDouble) {
  LONGKV_NEED_CARD();
  for (const Case& c : kCases) {
    for (const bool listed : {false, true}) {
      SCOPED_TRACE(name_of(c) << (listed ? ", listed" : ""));
      // Weights, keys and values are halves: 2^-11 of what they are, of averages over many rows.
      expect_attention(c, listed, 1.0f, 0.0f, 3, 7, [](double norm, double) { return 6e-3 * norm; });
    }
  }
}

// Values so small that products of weights and scales could leave the normal halves, of many rows that share the mass.
// A weight, its product with a scale, and products of queries with keys' scales are off by half a unit of a half's last
// place, some 2^-12 of what they are, each on its own.
TEST(CardOld, SmallValuesOfManyRows) {
  LONGKV_NEED_CARD();
  const Case cases[] = {{KvType::kKivi4, 5, 1, 128, 20000, 0, 32, 128}, {KvType::kKivi2, 5, 1, 128, 20000, 0, 32, 128},
                        {KvType::kKivi4, 3, 1, 64, 20000, 16, 32, 64},  {KvType::kKivi2, 7, 1, 64, 20000, 16, 32, 64},
                        {KvType::kKivi4, 1, 1, 256, 20000, 0, 32, 256}, {KvType::kKivi2, 3, 1, 256, 20000, 0, 32, 256}};
  for (const Case& c : cases) {
    double worst = 0;
    for (const auto& [of_values, mean] : {std::pair{0.02f, 0.0f}, {1e-4f, 0.0f}, {0.02f, 3.0f}, {300.0f, 0.0f}}) {
      for (const bool listed : {false, true}) {
        SCOPED_TRACE(name_of(c) << ", values of " << of_values << " and " << mean << (listed ? ", listed" : ""));
        worst = std::max(worst, expect_attention(c, listed, of_values, mean, 1, 1, [](double norm, double each) {
                           return 0x1p-9 * each + 0x1p-13 * norm;
                         }));
      }
    }
    std::printf("  %s, %d channels: largest error %.2f of what is allowed\n", kv_type_name(c.type), c.dim, worst);
  }
}

}  // namespace
}  // namespace longkv
