// Files that assign one of MInference's patterns to each query head.
//
// JSON: an array with one object per layer, from the query head's number to [pattern, first size, second size, score],
// as published with MInference. The score is informational. Patterns: "vertical_and_slash" (columns, diagonals),
// "stream_llm" or "a_shape" (sinks, window), "block_sparse" (blocks of 64), and ours: "dense".
#pragma once

#include <string>
#include <string_view>

#include "longkv/status.h"
#include "prefill/pattern.h"

namespace longkv {

// Unknown pattern names become dense and layers beyond the model's are left out, each with a notice. Sizes above the
// prompt's length mean all of it. Errors: kCorrupt (no such file's form), kInvalidArgument (layers or heads are missing
// under MissingHeads::kError, or heads that the model does not have).
Result<PatternAssignment> parse_assignment(std::string_view json, int layers, int heads, const PrefillSpec& spec);
// The same from spec.file. Errors: also kIo.
Result<PatternAssignment> load_assignment(const PrefillSpec& spec, int layers, int heads);
// Of a_shape, vertical_slash, block_sparse and minference: from the file where one is named, else the same pattern for
// every head. Errors: those of load_assignment.
Result<PatternAssignment> assignment_of(const PrefillSpec& spec, int layers, int heads);

// A file that parse_assignment reads back; scores: [layers][heads], may be empty.
std::string write_assignment(const PatternAssignment& assignment, const std::vector<std::vector<double>>& scores);

}  // namespace longkv
