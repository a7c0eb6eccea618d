// Products on the card through cuBLASLt, which is loaded when the first prompt or learning needs it, so that the
// program starts on machines without it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include "cuda/card_plan.h"
#include "cuda/kv.h"
#include "cuda/runtime.h"
#include "longkv/status.h"

namespace longkv {

// c [m][n] = a [m][k] . b [k][n] (+ c if add), row-major, sums in fp32. Batches lie `step` values apart.
struct CardProduct {
  int64_t m = 0, n = 0, k = 0;
  bool a_turned = false, b_turned = false;           // a lies as [k][m], b as [n][k]
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;  // values between rows as they lie
  int64_t batch = 1, a_step = 0, b_step = 0, c_step = 0;
  bool halves = false;  // a and b; else fp32
  bool add = false;
};

class CardGemm {
 public:
  static constexpr int64_t kWorkspace = kCardGemmWorkspace;  // bytes of VRAM
  // Errors: kUnsupported when the library is missing.
  static Result<std::unique_ptr<CardGemm>> create(CardMemory& memory);
  ~CardGemm();

  // y[t][r] = (add ? y[t][r] : 0) + x[t] . w[r]: x [tokens][cols] and w [rows][cols] halves, y [tokens][y_stride] fp32.
  Status run(const card::half_t* x, const card::half_t* w, int64_t tokens, int64_t rows, int64_t cols, bool add,
             float* y, int64_t y_stride, CardStreamHandle stream);
  // Any product; the same operands give the same bits. c may not overlap a or b.
  Status run(const CardProduct& product, const void* a, const void* b, float* c, CardStreamHandle stream);
  // Bytes at whose multiples all operands lie, those of every batch; at most 256. Algorithms that load wide words are
  // offered only where these allow it.
  static int64_t alignment(const CardProduct& product, const void* a, const void* b, const float* c);

 private:
  struct Library;
  struct Plan;
  CardGemm() = default;
  using Key = std::array<int64_t, 12>;
  Result<Plan*> plan(const CardProduct& product, int64_t alignment);
  Status multiply(const CardProduct& product, int64_t alignment, const void* a, const void* b, float* c,
                  CardStreamHandle stream);

  std::shared_ptr<Library> library_;
  void* handle_ = nullptr;
  CardBuffer workspace_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace longkv
