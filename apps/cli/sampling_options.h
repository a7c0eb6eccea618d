// Sampling flags, llama.cpp's names and defaults.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "longkv/status.h"
#include "sample/params.h"

namespace longkv::cli {

struct SamplingOptions {
  SamplingParams params;
  int64_t seed = -1;  // -1: random, printed
  std::string samplers;
  std::vector<std::string> logit_bias;
  bool ignore_eos = false;
};

void add_sampling_options(CLI::App& command, SamplingOptions& options);
// Checked parameters with the seed resolved; prints a random seed so that the run can be repeated.
Result<SamplingParams> resolve_sampling(const SamplingOptions& options);
// kInvalidArgument when a bias names a token that the model does not have.
Status check_biased_ids(const SamplingParams& params, int64_t vocab);

}  // namespace longkv::cli
