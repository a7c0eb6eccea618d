// Where the forced rows of a step lie, for scoring and choosing alike.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/select.h"

namespace longkv::card {

// Where the forced rows of a step end and begin, and how many blocks are chosen between them.
struct Choice {
  int64_t rows, sink, tail, begin, end, wanted;
  bool all;
};
__device__ __forceinline__ Choice choice_of(int64_t position, int block, const ChoiceRules& rules) {
  Choice c;
  c.rows = position + 1;
  c.all = c.rows <= rules.budget;
  c.sink = min(rules.sink, c.rows);
  c.tail = max(c.sink, min(c.rows - max(rules.local, int64_t(1)), c.rows / block * block));
  const int64_t left = max(int64_t(1), rules.budget - c.sink - (c.rows - c.tail));
  c.begin = c.sink / block;
  c.end = c.tail > c.sink ? (c.tail + block - 1) / block : c.begin;
  c.wanted = min(max(int64_t(1), left / block), c.end - c.begin);
  return c;
}

}  // namespace longkv::card
