// The one-bit index on the card against its definition in double.
#include "cuda/bits.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cuda/card.h"
#include "cuda/expected_rows.h"

namespace longkv {
namespace {

using test::OnCard;

// Orthonormal Hadamard transform by its definition: entry (i, j) has the sign of the parity of i & j.
std::vector<double> rotated(const std::vector<double>& x) {
  const auto n = x.size();
  std::vector<double> y(n, 0.0);
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < n; ++j) y[i] += std::popcount(i & j) % 2 == 0 ? x[j] : -x[j];
  for (double& v : y) v /= std::sqrt(double(n));
  return y;
}

struct Case {
  int heads, kv_heads, dim, block;
  bool rotate;
  int64_t rows;
  KvType type = KvType::kF16;
  bool unbiased = true;
};

TEST(CardBits, SharesOfMassAsInDouble) {
  LONGKV_NEED_CARD();
  for (const Case& c :
       {Case{4, 2, 64, 16, true, 700}, Case{8, 2, 128, 16, true, 5000}, Case{32, 8, 128, 16, false, 1500},
        Case{12, 1, 128, 32, true, 1100}, Case{4, 1, 256, 64, true, 900}, Case{7, 1, 128, 16, true, 1037},
        Case{16, 1, 64, 48, false, 2000}, Case{4, 1, 64, 16, false, 150000}, Case{20, 2, 256, 16, true, 400},
        Case{3, 1, 64, 16, true, 333}, Case{8, 2, 128, 16, true, 900, KvType::kF16, false},
        Case{8, 2, 128, 16, true, 900, KvType::kQ8_0}}) {
    SCOPED_TRACE(testing::Message() << c.heads << "/" << c.kv_heads << " x " << c.dim << ", blocks of " << c.block
                                    << ", " << kv_type_name(c.type));
    const int64_t capacity = (c.rows + 63) / 64 * 64, blocks = capacity / c.block;
    const OnCard memory(card::card_kv_bytes(c.type, c.kv_heads, c.dim, capacity));
    const card::CardKv kv = card::place_kv(c.type, c.kv_heads, c.dim, capacity, memory.data());
    ASSERT_DONE(card::fill_rows(kv, c.rows, 12, nullptr));
    const OnCard halves(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, capacity));
    ASSERT_DONE(card::decode_rows(kv, 0, c.rows,
                                  card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, halves.data()), nullptr));
    const auto keys = halves.read<uint16_t>(c.kv_heads * capacity * c.dim);
    const OnCard index(card::bits_bytes(c.block, c.kv_heads, c.dim, blocks)),
        scratch(card::BitsScratch::bytes(c.heads, c.kv_heads, c.block, blocks)),
        scores(card::score_bytes(c.kv_heads, blocks));
    const card::CardBits bits =
        card::place_bits(c.block, c.kv_heads, c.dim, blocks, c.rotate, c.unbiased, index.data());
    // All but the last row at once, that one as a decoded token's.
    ASSERT_DONE(card::write_bits(kv, bits, 0, c.rows - 1, nullptr));
    const std::vector<int64_t> at = {c.rows - 1};
    const OnCard position = OnCard::of(at);
    ASSERT_DONE(card::write_bits_last(kv, bits, position.as<int64_t>(), nullptr));
    const auto queries = test::to_halves(test::normal_floats(c.heads * c.dim, 3, 2.0f));
    const OnCard q = OnCard::of(queries);
    const card::ChoiceRules rules{c.block * 8, 20, 40, false, false};
    const double scale = 1 / std::sqrt(double(c.dim));
    ASSERT_DONE(card::score_bits(q.as<card::half_t>(), c.heads, kv, bits, rules, float(scale), position.as<int64_t>(),
                                 card::BitsScratch::at(scratch.data(), c.heads), scores.as<float>(), nullptr));
    const auto got = scores.read<float>(c.kv_heads * blocks);
    // The tops that the scan left serve the choice.
    card::CardSummaries s;
    s.block = c.block, s.capacity = blocks;
    const int64_t stride = rules.tiles(c.block);
    const OnCard tiles(c.kv_heads * stride * 8), count(c.kv_heads * 4);
    ASSERT_DONE(card::choose_blocks(scores.as<float>(), card::Tops::kLeft, c.kv_heads, s, rules, position.as<int64_t>(),
                                    tiles.as<int32_t>(), count.as<int32_t>(), stride, nullptr));
    const auto list = tiles.read<int32_t>(c.kv_heads * stride * 2);
    const auto counts = count.read<int32_t>(c.kv_heads);
    for (int h = 0; h < c.kv_heads; ++h) {
      ASSERT_LE(counts[size_t(h)], stride);
      EXPECT_EQ(test::rows_of(&list[size_t(h * stride * 2)], counts[size_t(h)]),
                test::expected_rows({got.begin() + h * blocks, got.begin() + (h + 1) * blocks}, c.rows, c.block, rules))
          << "head " << h;
    }

    const int64_t tail = std::min(c.rows - 40, c.rows / c.block * c.block);
    const int64_t begin = 20 / c.block, end = (tail + c.block - 1) / c.block;
    const int group = c.heads / c.kv_heads;
    for (int h = 0; h < c.kv_heads; ++h) {
      std::vector<std::vector<double>> approximate;  // keys
      std::vector<std::vector<size_t>> unsure;       // channels whose sign a rounding may turn
      for (int64_t r = 0; r < end * c.block; ++r) {
        std::vector<double> k;
        for (int i = 0; i < c.dim; ++i) k.push_back(test::half_float(keys[size_t((h * capacity + r) * c.dim + i)]));
        if (c.rotate) k = rotated(k);
        // The card rounds in floats; quantised rows are read here as halves, there as they are.
        unsure.emplace_back();
        for (size_t i = 0; i < k.size(); ++i)
          if (std::abs(k[i]) < (c.type == KvType::kF16 ? 1e-5 : 2e-3)) unsure.back().push_back(i);
        for (int g = 0; g < c.dim; g += 32) {
          double sum = 0, square = 0;
          for (int i = g; i < g + 32; ++i) sum += std::abs(k[size_t(i)]), square += k[size_t(i)] * k[size_t(i)];
          const double size = c.unbiased ? square / sum : sum / 32;
          for (int i = g; i < g + 32; ++i) k[size_t(i)] = k[size_t(i)] >= 0 ? size : -size;
        }
        approximate.push_back(k);
      }
      std::vector<double> want(size_t(blocks), 0.0), slack(size_t(blocks), 0.0);
      for (int j = 0; j < group; ++j) {
        std::vector<double> x;
        for (int i = 0; i < c.dim; ++i) x.push_back(test::half_float(queries[size_t((h * group + j) * c.dim + i)]));
        if (c.rotate) x = rotated(x);
        std::vector<double> mass(size_t(blocks), 0.0), turned(size_t(blocks), 0.0);
        double all = 0;
        for (int64_t b = begin; b < end; ++b) {
          for (int64_t r = b * c.block; r < (b + 1) * c.block; ++r) {
            double dot = 0;
            for (int i = 0; i < c.dim; ++i) dot += x[size_t(i)] * approximate[size_t(r)][size_t(i)];
            mass[size_t(b)] += std::exp(dot * scale);
            double more = 0;
            for (const size_t i : unsure[size_t(r)]) more += 2 * std::abs(x[i] * approximate[size_t(r)][i]);
            turned[size_t(b)] += std::exp(dot * scale) * (std::exp(more * scale) - 1);
          }
          all += mass[size_t(b)];
        }
        for (int64_t b = begin; b < end; ++b)
          want[size_t(b)] += mass[size_t(b)] / all, slack[size_t(b)] += turned[size_t(b)] / all;
      }
      // Queries have 13 bits and magnitudes 11 (2^-11 of a dot product of about 10), and a sign near zero may differ.
      for (int64_t b = begin; b < end; ++b)
        ASSERT_NEAR(got[size_t(h * blocks + b)], want[size_t(b)], 0.04 * want[size_t(b)] + slack[size_t(b)])
            << "head " << h << " block " << b;
    }
  }
}

}  // namespace
}  // namespace longkv
