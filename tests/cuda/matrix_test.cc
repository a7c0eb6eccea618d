#include <algorithm>
#include <cmath>

#include "base/threads.h"
#include "cuda/card.h"
#include "cuda/ops.h"
#include "ops/packed_rows.h"
#include "quant/block_formats.h"

namespace longkv {
namespace {

using test::OnCard;

constexpr TensorType kTypes[] = {TensorType::kF32,  TensorType::kF16,    TensorType::kBF16,  TensorType::kQ4_0,
                                 TensorType::kQ4_1, TensorType::kQ5_0,   TensorType::kQ5_1,  TensorType::kQ8_0,
                                 TensorType::kQ2_K, TensorType::kQ3_K,   TensorType::kQ4_K,  TensorType::kQ5_K,
                                 TensorType::kQ6_K, TensorType::kIQ4_NL, TensorType::kIQ4_XS};

// Random rows: any bits for quants and packed scales, halves of sane size where a block keeps them.
std::vector<uint8_t> random_rows(TensorType type, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t bytes = rows * row_bytes(type, cols).value();
  std::vector<uint8_t> raw(static_cast<size_t>(bytes));
  for (uint8_t& b : raw) b = uint8_t(random());
  const TensorTypeInfo* info = tensor_type_info(type);
  std::uniform_real_distribution<float> scale(0.001f, 0.02f);
  for (int64_t at = 0; at < bytes; at += info->block_bytes) {
    const auto put = [&](size_t offset, float v) {
      const f16_t h = to_f16(v);
      std::memcpy(raw.data() + at + offset, &h, 2);
    };
    switch (type) {
      case TensorType::kF32: {
        const float v = scale(random) * (random() % 2 == 0 ? 1.0f : -1.0f);
        std::memcpy(raw.data() + at, &v, 4);
        break;
      }
      case TensorType::kF16: put(0, scale(random) - 0.01f); break;
      case TensorType::kBF16: {
        const bf16_t v = to_bf16(scale(random) - 0.01f);
        std::memcpy(raw.data() + at, &v, 2);
        break;
      }
      case TensorType::kQ4_1:
      case TensorType::kQ5_1:
        put(0, scale(random));
        put(2, -scale(random) * 8);
        break;
      case TensorType::kQ2_K:
        put(offsetof(BlockQ2_K, d), scale(random));
        put(offsetof(BlockQ2_K, dmin), scale(random));
        break;
      case TensorType::kQ3_K: put(offsetof(BlockQ3_K, d), scale(random)); break;
      case TensorType::kQ4_K:
      case TensorType::kQ5_K:
        put(0, scale(random));
        put(2, scale(random));
        break;
      case TensorType::kQ6_K: put(offsetof(BlockQ6_K, d), -scale(random)); break;
      default: put(0, scale(random)); break;
    }
  }
  return raw;
}

struct Loaded {
  std::vector<float> values;  // as the CPU decodes them
  CardMatrix m;
  OnCard memory;
};

Loaded load(TensorType type, int64_t rows, int64_t cols, uint32_t seed) {
  const std::vector<uint8_t> raw = random_rows(type, rows, cols, seed);
  const int64_t bytes = row_bytes(type, cols).value();
  Loaded l{std::vector<float>(size_t(rows * cols)), {type, rows, cols}, OnCard(card_matrix_bytes(type, rows, cols))};
  for (int64_t r = 0; r < rows; ++r) dequantize(type, raw.data() + r * bytes, l.values.data() + r * cols, cols);
  place_planes(l.m, l.memory.data());
  const OnCard on_card = OnCard::of(raw);
  // In two pieces, as long matrices are.
  const int64_t first = rows / 2;
  EXPECT_TRUE(card::pack_rows(l.m, on_card.data(), bytes, 0, first, nullptr).ok() || first == 0);
  EXPECT_TRUE(card::pack_rows(l.m, on_card.data() + first * bytes, bytes, first, rows - first, nullptr).ok());
  OnCard::check(cudaDeviceSynchronize());
  return l;
}

TEST(CardMatrix, DecodesEveryTypeAsTheCpuDoes) {
  LONGKV_NEED_CARD();
  for (TensorType type : kTypes) {
    SCOPED_TRACE(tensor_type_info(type)->name);
    constexpr int64_t kRows = 5, kCols = 768;
    const Loaded l = load(type, kRows, kCols, 7 + uint32_t(type));
    const OnCard out(kRows * kCols * 2);
    ASSERT_DONE(card::decode_matrix(l.m, 0, kRows, out.as<card::half_t>(), nullptr));
    const auto got = out.read<uint16_t>(kRows * kCols);
    for (int64_t r = 0; r < kRows; ++r) {
      // A value is a half; scales of super-blocks are halves relative to the row's largest (2^-11 each of quant,
      // minimum and result, none of which exceeds twice the row's largest magnitude with its minimum).
      float top = 0;
      for (int64_t c = 0; c < kCols; ++c) top = std::max(top, std::abs(l.values[size_t(r * kCols + c)]));
      for (int64_t c = 0; c < kCols; ++c) {
        const float want = l.values[size_t(r * kCols + c)], have = test::half_float(got[size_t(r * kCols + c)]);
        ASSERT_NEAR(have, want, 4 * top * 0x1p-11f + 0x1p-24f) << "row " << r << " column " << c;
      }
    }
  }
}

// Planes from the form in which the CPU decodes eight rows at a time.
TEST(CardMatrix, PackedFormGivesTheSamePlanes) {
  LONGKV_NEED_CARD();
  ThreadPool pool(2);
  int types = 0;
  for (TensorType type : {TensorType::kQ4_0, TensorType::kQ4_1, TensorType::kQ5_0, TensorType::kQ5_1}) {
    if (!reads_packed(type)) continue;
    ++types;
    SCOPED_TRACE(tensor_type_info(type)->name);
    constexpr int64_t kRows = 21, kCols = 160, kBefore = 3;  // rows of another matrix in the same planes
    const std::vector<uint8_t> raw = random_rows(type, kRows, kCols, 17);
    Weight w{type, kRows, kCols, row_bytes(type, kCols).value(), raw.data()};
    std::vector<uint8_t> packed(size_t(packed_bytes(w)), 0);
    pack_rows(w, packed.data(), pool);
    const OnCard file = OnCard::of(raw), eights = OnCard::of(packed);
    std::vector<std::vector<uint8_t>> planes;
    for (const bool from_packed : {false, true}) {
      CardMatrix m{type, kRows + kBefore, kCols};
      const int64_t bytes = card_matrix_bytes(type, m.rows, kCols);
      const OnCard memory(bytes);
      place_planes(m, memory.data());
      ASSERT_DONE(from_packed ? card::pack_eights(m, eights.data(), w.row_bytes, kBefore, kRows, nullptr)
                              : card::pack_rows(m, file.data(), w.row_bytes, kBefore, kRows, nullptr));
      planes.push_back(memory.read<uint8_t>(bytes));
    }
    EXPECT_EQ(planes[0], planes[1]);
  }
  std::printf("  %d types\n", types);
}

// One row of x, by the operator that makes it.
struct Row {
  OnCard memory, input;
  card::CardRow row;
};
Row make_row(const std::vector<float>& x) {
  const auto n = int64_t(x.size());
  Row r{OnCard(card::CardRow::bytes(n)), OnCard::of(x), {}};
  r.row = card::CardRow::at(r.memory.data(), n);
  EXPECT_TRUE(card::norm_row(r.input.as<float>(), nullptr, 0, n, r.row, nullptr).ok());
  return r;
}

TEST(CardMatrix, ProductsOfEveryTypeAndEdge) {
  LONGKV_NEED_CARD();
  for (TensorType type : kTypes) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 256}, {37, 768}, {4099, 1024}, {64, 9216}}) {
      SCOPED_TRACE(testing::Message() << tensor_type_info(type)->name << ' ' << rows << " x " << cols);
      const Loaded l = load(type, rows, cols, 91 + uint32_t(type));
      const std::vector<float> x = test::normal_floats(cols, 5), bias = test::normal_floats(rows, 6);
      const Row row = make_row(x);
      const OnCard b = OnCard::of(bias), y = OnCard::of(bias);
      ASSERT_DONE(card::matvec(l.m, row.row, b.as<float>(), true, y.as<float>(), nullptr));
      const auto got = y.read<float>(rows);
      for (int64_t r = 0; r < rows; ++r) {
        double want = 2.0 * bias[size_t(r)], allowed = 1e-5;
        for (int64_t g = 0; g < cols; g += 32) {
          float top = 0;
          for (int64_t c = g; c < g + 32; ++c) top = std::max(top, std::abs(x[size_t(c)]));
          for (int64_t c = g; c < g + 32; ++c) {
            const double w = l.values[size_t(r * cols + c)];
            want += w * x[size_t(c)];
            // Half a step of the integers, halves of scales, and fp32 sums.
            allowed += std::abs(w) * ((l.m.is_float() ? 0.0 : top / 254.0) + std::abs(x[size_t(c)]) * 0x1p-9);
          }
        }
        ASSERT_NEAR(got[size_t(r)], want, allowed) << "row " << r;
      }
    }
  }
}

TEST(CardRow, NormHoldsTheValuesAndTheirIntegers) {
  LONGKV_NEED_CARD();
  for (int64_t n : {32, 576, 4096, 14336}) {
    const std::vector<float> x = test::normal_floats(n, 3, 2.0f), weight = test::normal_floats(n, 4);
    const OnCard in = OnCard::of(x), w = OnCard::of(weight), memory(card::CardRow::bytes(n));
    const card::CardRow row = card::CardRow::at(memory.data(), n);
    ASSERT_DONE(card::norm_row(in.as<float>(), w.as<float>(), 1e-5f, n, row, nullptr));
    double sum = 0;
    for (float v : x) sum += double(v) * v;
    const double inverse = 1.0 / std::sqrt(sum / double(n) + 1e-5);
    const auto bytes = memory.read<uint8_t>(card::CardRow::bytes(n));
    const auto* f = reinterpret_cast<const float*>(bytes.data());
    const auto* q = reinterpret_cast<const int8_t*>(bytes.data() + n * 4);
    const auto* s = reinterpret_cast<const float*>(bytes.data() + n * 5);
    for (int64_t i = 0; i < n; ++i) {
      const double want = x[size_t(i)] * inverse * weight[size_t(i)];
      ASSERT_NEAR(f[i], want, 1e-5 * std::abs(want) + 1e-7);
      const int64_t g = i / 32, at = (i % 32 / 16) * (n / 2) + g * 16 + i % 16;
      ASSERT_NEAR(q[at] * double(s[4 * g]), want, 0.5001 * s[4 * g] + 1e-7);
    }
    for (int64_t g = 0; g < n / 32; ++g) {
      for (int h = 0; h < 2; ++h) {
        int total = 0;
        for (int i = 0; i < 16; ++i) total += q[h * (n / 2) + g * 16 + i];
        ASSERT_NEAR(s[4 * g + 1 + h], double(s[4 * g]) * total, 1e-5 * std::abs(s[4 * g]) * 2048);
      }
    }
  }
}

TEST(CardRow, GateOfOneTokenAndOfRows) {
  LONGKV_NEED_CARD();
  constexpr int64_t kN = 608, kRows = 3;
  for (Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
    std::vector<float> gate_up = test::normal_floats(2 * kN * kRows, 8, 3.0f);
    gate_up[5] = 30000.0f;  // the first row leaves the range of halves
    gate_up[kN + 5] = 900.0f;
    const auto want = [&](int64_t r, int64_t i) {
      const double g = gate_up[size_t(r * 2 * kN + i)], u = gate_up[size_t(r * 2 * kN + kN + i)];
      if (activation == Activation::kSilu) return g / (1 + std::exp(-g)) * u;
      return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
    };
    const OnCard in = OnCard::of(gate_up), memory(card::CardRow::bytes(kN)), out(kRows * kN * 2), scale(kRows * 4);
    const card::CardRow row = card::CardRow::at(memory.data(), kN);
    ASSERT_DONE(card::gate_row(activation, in.as<float>(), kN, row, nullptr));
    ASSERT_DONE(
        card::gate_rows(activation, in.as<float>(), kRows, kN, out.as<card::half_t>(), scale.as<float>(), nullptr));
    const auto one = memory.read<float>(kN);
    const auto rows = out.read<uint16_t>(kRows * kN);
    const auto scales = scale.read<float>(kRows);
    EXPECT_GT(scales[0], 1.0f);
    for (int64_t i = 0; i < kN; ++i) ASSERT_NEAR(one[size_t(i)], want(0, i), 1e-5 * std::abs(want(0, i)) + 1e-6);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < kN; ++i) {
        const double w = want(r, i);
        ASSERT_NEAR(double(test::half_float(rows[size_t(r * kN + i)])) * scales[size_t(r)], w,
                    0x1p-10 * std::abs(w) + 0x1p-24 * scales[size_t(r)] + 1e-6);
      }
    }
  }
}

TEST(CardRow, ResidualSums) {
  LONGKV_NEED_CARD();
  constexpr int64_t kRows = 3, kDim = 640;
  const auto x = test::normal_floats(kRows * kDim, 1), y = test::normal_floats(kRows * kDim, 2);
  const auto bias = test::normal_floats(kDim, 3), weight = test::normal_floats(kDim, 4);
  const std::vector<float> scale = {1.0f, 4.0f, 0.5f};
  for (bool norm : {false, true}) {
    const OnCard cx = OnCard::of(x), cy = OnCard::of(y), cb = OnCard::of(bias), cw = OnCard::of(weight),
                 cs = OnCard::of(scale);
    ASSERT_DONE(card::add_rows(cx.as<float>(), cs.as<float>(), cb.as<float>(), norm ? cw.as<float>() : nullptr, 1e-6f,
                               kRows, kDim, cy.as<float>(), nullptr));
    const auto got = cy.read<float>(kRows * kDim);
    for (int64_t r = 0; r < kRows; ++r) {
      double sum = 0;
      const auto value = [&](int64_t i) {
        return double(x[size_t(r * kDim + i)]) * scale[size_t(r)] + bias[size_t(i)];
      };
      for (int64_t i = 0; i < kDim; ++i) sum += value(i) * value(i);
      const double inverse = 1 / std::sqrt(sum / kDim + 1e-6);
      for (int64_t i = 0; i < kDim; ++i) {
        const double want = y[size_t(r * kDim + i)] + (norm ? value(i) * inverse * weight[size_t(i)] : value(i));
        ASSERT_NEAR(got[size_t(r * kDim + i)], want, 1e-5 * (1 + std::abs(want)));
      }
    }
  }
}

}  // namespace
}  // namespace longkv
