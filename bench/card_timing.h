// What the card's benchmarks share: errors end the program, memory is never given back, times are medians of a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "longkv/status.h"

namespace longkv::bench {

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}
inline void check(cudaError_t e) {
  if (e != cudaSuccess) die(cudaGetErrorString(e));
}
inline void check(const Status& s) {
  if (!s.ok()) die(s.message().c_str());
}
inline uint8_t* memory(int64_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, size_t(bytes)));
  return static_cast<uint8_t*>(p);
}

// Milliseconds of what `step` starts on `stream`, captured once: the median of 20 launches after 3 that do not count.
inline double median_ms(cudaStream_t stream, const std::function<void()>& step) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  step();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(exec, stream));
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms);
  }
  check(cudaGraphExecDestroy(exec));
  check(cudaGraphDestroy(graph));
  std::nth_element(times.begin(), times.begin() + 10, times.end());
  return times[10];
}

}  // namespace longkv::bench
