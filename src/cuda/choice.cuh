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
  c.all = rules.blocks == 0 && c.rows <= rules.budget;
  c.sink = min(rules.sink, c.rows);
  c.tail = max(c.sink, min(c.rows - max(rules.local, int64_t(1)), c.rows / block * block));
  const int64_t left = max(int64_t(1), rules.budget - c.sink - (c.rows - c.tail));
  c.begin = c.sink / block;
  c.end = c.tail > c.sink ? (c.tail + block - 1) / block : c.begin;
  c.wanted = min(rules.blocks > 0 ? rules.blocks : max(int64_t(1), left / block), c.end - c.begin);
  return c;
}

// The candidates of a list by their places [begin, end), in the order of blocks.
struct Places {
  int64_t begin, end;
  const int32_t* coarse;  // nullptr: a place is a block
  int64_t listed, rest;
  int factor;
  __device__ __forceinline__ int64_t block(int64_t place) const {
    if (coarse == nullptr) return place;
    if (place >= listed) return rest + place - listed;
    const unsigned at = unsigned(place), size = unsigned(factor);  // a place is below the number of blocks
    return int64_t(coarse[at / size]) * factor + at % size;
  }
};
__device__ __forceinline__ Places places_of(const ChoiceRules& rules, int head, int block, const Choice& c) {
  Places p{c.begin, c.end, nullptr, 0, 0, 1};
  const Candidates& among = rules.among;
  const int list = rules.shared ? 0 : head;
  if (among.factor == 0 || among.count[list] < 0) return p;
  p.factor = among.factor;
  p.coarse = among.coarse + list * among.stride;
  p.listed = int64_t(among.count[list]) * among.factor;
  p.rest = max(c.begin, c.rows / (int64_t(block) * among.factor) * among.factor);
  p.begin = 0;
  p.end = p.listed + max(int64_t(0), c.end - p.rest);
  return p;
}

}  // namespace longkv::card
