// Gathers what a keeper needs while a prompt is read: attention mass, queries, statistics.
#pragma once

#include <vector>

#include "kv/keep/keep.h"
#include "prefill/attention.h"

namespace longkv {

class KeepCollector {
 public:
  KeepCollector(const KvShape& shape, const KeepNeeds& needs);

  // Before a chunk is attended, its rows appended: asks the attention for the mass that is wanted. `rows`: of the
  // layer's fullest head, the chunk's included.
  void before_chunk(int layer, int64_t rows, int64_t prompt_end, PrefillAttendArgs& args);
  // After: takes over queries and statistics.
  void after_chunk(int layer, int64_t prompt_end, const PrefillAttendArgs& args, const KvRotate& rotate,
                   ThreadPool& pool);
  // Fills what a keeper is given of the layer; valid until drop().
  void give(int layer, KeepInput& input);
  void drop(int layer);

 private:
  struct State {
    int64_t start = -1;  // first position of the prompt; -1: none is being read
    int64_t mass_stride = 0;
    int64_t mass_queries = 0;
    std::vector<float> mass;
    KeepQueries queries;
    KeepStatistics statistics;
  };
  int64_t query_heads() const { return int64_t(shape_.kv_heads) * shape_.group_size; }
  void begin(State& state, int64_t start);
  void take_query(State& state, const PrefillAttendArgs& args, int64_t token);
  void add_statistics(State& state, int layer, const PrefillAttendArgs& args, const KvRotate& rotate, ThreadPool& pool);

  KvShape shape_;
  KeepNeeds needs_;
  std::vector<State> states_;  // [layers]
  std::vector<std::vector<float>> free_mass_;
  std::vector<float> turned_;  // [chunk][query heads][dim_k]
};

}  // namespace longkv
