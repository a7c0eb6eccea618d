// Products of prompts on the card through cuBLASLt, which is loaded when the first prompt needs it, so that the program
// starts on machines without it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "cuda/card_plan.h"
#include "cuda/kv.h"
#include "cuda/runtime.h"
#include "longkv/status.h"

namespace longkv {

class CardGemm {
 public:
  static constexpr int64_t kWorkspace = kCardGemmWorkspace;  // bytes of VRAM
  // Errors: kUnsupported when the library is missing.
  static Result<std::unique_ptr<CardGemm>> create(CardMemory& memory);
  ~CardGemm();

  // y[t][r] = (add ? y[t][r] : 0) + x[t] . w[r]: x [tokens][cols] and w [rows][cols] halves, y [tokens][y_stride] fp32.
  Status run(const card::half_t* x, const card::half_t* w, int64_t tokens, int64_t rows, int64_t cols, bool add,
             float* y, int64_t y_stride, CardStreamHandle stream);

 private:
  struct Library;
  struct Plan;
  CardGemm() = default;
  Result<Plan*> plan(int64_t tokens, int64_t rows, int64_t cols, int64_t y_stride);

  std::shared_ptr<Library> library_;
  void* handle_ = nullptr;
  CardBuffer workspace_;
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t>, std::unique_ptr<Plan>> plans_;
};

}  // namespace longkv
