// Intrinsics of x86, for sources that are compiled for AVX-512.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own _mm512_undefined_epi32() wherever an intrinsic with it is inlined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
