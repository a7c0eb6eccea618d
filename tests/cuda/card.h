// What the tests on a card share. Without a card they are skipped with the reason.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "base/float16.h"
#include "cuda/cards.h"
#include "cuda/runtime.h"

#define LONGKV_NEED_CARD() \
  if (const auto card = ::longkv::open_card(0); !card.ok()) GTEST_SKIP() << card.status().message()
#define ASSERT_DONE(expr)                                   \
  do {                                                      \
    const ::longkv::Status done_status = (expr);            \
    ASSERT_TRUE(done_status.ok()) << done_status.message(); \
  } while (0)
#define EXPECT_DONE(expr)                                   \
  do {                                                      \
    const ::longkv::Status done_status = (expr);            \
    EXPECT_TRUE(done_status.ok()) << done_status.message(); \
  } while (0)

namespace longkv::test {

// Device memory of a test; failures end it through an exception, which GoogleTest reports.
class OnCard {
 public:
  explicit OnCard(int64_t bytes) : bytes_(bytes) {
    auto made = CardBuffer::create(memory(), bytes < 16 ? 16 : bytes, "memory of a test");
    if (!made.ok()) throw std::runtime_error(made.status().message());
    buffer_ = std::move(made).value();
    // What a kernel forgets to write shows as NaN.
    check(cudaMemset(buffer_.data(), 0xff, size_t(buffer_.bytes())));
  }
  template <class T>
  static OnCard of(std::span<const T> values) {
    OnCard m(int64_t(values.size_bytes()));
    check(cudaMemcpy(m.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
    return m;
  }
  template <class T>
  static OnCard of(const std::vector<T>& values) {
    return of(std::span<const T>(values));
  }
  uint8_t* data() const { return buffer_.data(); }
  template <class T>
  T* as() const {
    return buffer_.as<T>();
  }
  template <class T>
  std::vector<T> read(int64_t n) const {
    std::vector<T> values(static_cast<size_t>(n));
    check(cudaDeviceSynchronize());
    check(cudaMemcpy(values.data(), buffer_.data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  static void check(cudaError_t e) {
    if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
  }

 private:
  static CardMemory& memory() {
    static CardMemory all(0);
    return all;
  }
  int64_t bytes_;
  CardBuffer buffer_;
};

inline std::vector<float> normal_floats(int64_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = normal(random);
  return v;
}
inline std::vector<uint16_t> to_halves(const std::vector<float>& v) {
  std::vector<uint16_t> h;
  for (float x : v) h.push_back(to_f16(x).bits);
  return h;
}
inline float half_float(uint16_t bits) { return to_float(f16_t{bits}); }

}  // namespace longkv::test
