// Choice of kernel by weight type and number of tokens, shared by the x86 levels. Included by one file per level.
#pragma once

#include <type_traits>

#include "ops/matvec_x86_packed.h"
#include "ops/matvec_x86_small.h"
#include "ops/matvec_x86_super.h"

namespace longkv {
namespace {

// The packed form of a weight type; void: it has none.
template <class T>
struct PackedForm {
  using Type = void;
};
template <>
struct PackedForm<Q4_0> {
  using Type = PackedQ4_0;
};
template <>
struct PackedForm<Q4_1> {
  using Type = PackedQ4_1;
};
template <>
struct PackedForm<Q5_0> {
  using Type = PackedQ5_0;
};
template <>
struct PackedForm<Q5_1> {
  using Type = PackedQ5_1;
};

template <class T, int kTokens>
inline void some_tokens(const Weight& w, const QuantizedRows& x, int64_t token, int64_t begin, int64_t end, float* y,
                        int64_t y_stride) {
  if constexpr (!std::is_void_v<typename PackedForm<T>::Type>) {
    if (w.packed != nullptr)
      return packed_rows<typename PackedForm<T>::Type, kTokens>(w, x, token, begin, end, y, y_stride);
  }
  if constexpr (sizeof(typename T::Block) > 34) {
    super_rows<T, kTokens>(w, x, token, begin, end, y, y_stride);
  } else {
    small_rows<T, kTokens>(w, x, token, begin, end, y, y_stride);
  }
}

template <class T>
void matvec_rows(const Weight& w, const QuantizedRows& x, int64_t begin, int64_t end, float* y, int64_t y_stride) {
  int64_t t = 0;
  for (; t + kMatvecTokens <= x.tokens; t += kMatvecTokens) {
    some_tokens<T, kMatvecTokens>(w, x, t, begin, end, y, y_stride);
  }
  static_assert(kMatvecTokens == 4);
  switch (x.tokens - t) {
    case 1: return some_tokens<T, 1>(w, x, t, begin, end, y, y_stride);
    case 2: return some_tokens<T, 2>(w, x, t, begin, end, y, y_stride);
    case 3: return some_tokens<T, 3>(w, x, t, begin, end, y, y_stride);
    default: return;
  }
}

inline MatvecRows choose_matvec_rows(TensorType type) {
  switch (type) {
    case TensorType::kQ4_0: return matvec_rows<Q4_0>;
    case TensorType::kQ4_1: return matvec_rows<Q4_1>;
    case TensorType::kQ5_0: return matvec_rows<Q5_0>;
    case TensorType::kQ5_1: return matvec_rows<Q5_1>;
    case TensorType::kQ8_0: return matvec_rows<Q8_0>;
    case TensorType::kIQ4_NL: return matvec_rows<Iq4Nl>;
    case TensorType::kQ2_K: return matvec_rows<Q2K>;
    case TensorType::kQ3_K: return matvec_rows<Q3K>;
    case TensorType::kQ4_K: return matvec_rows<Q4K>;
    case TensorType::kQ5_K: return matvec_rows<Q5K>;
    case TensorType::kQ6_K: return matvec_rows<Q6K>;
    case TensorType::kIQ4_XS: return matvec_rows<Iq4Xs>;
    default: return nullptr;
  }
}

}  // namespace
}  // namespace longkv
