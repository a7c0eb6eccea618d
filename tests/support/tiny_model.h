// A llama model of two layers with random weights and a byte vocabulary, whole or with any chosen mistake.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "support/mkgguf.h"
#include "support/vocabularies.h"

namespace longkv::test {

// What differs from the right tensor.
struct TensorMistake {
  bool missing = false;
  std::vector<uint64_t> dims;        // empty: as expected
  std::optional<uint32_t> raw_type;  // a type id with data of f32's size
  std::optional<float> first_value;  // in place of the first number
};

struct TinyModel {
  std::string architecture = "llama";
  std::string pre = "gpt-2";
  std::string chat_template;  // empty: none
  int64_t blocks = 2;         // as the file says; the tensors are those of two
  float epsilon = 1e-5f;
  int64_t eos_id = -1;  // -1: the vocabulary's own
  uint64_t seed = 1;
  std::map<std::string, TensorMistake> mistakes;  // by tensor
  std::function<void(MkGguf&)> more;              // further keys

  // Writes the file and returns its path.
  std::string write(const std::string& name) const;
};

// The same with ChatML's markers and template. It answers in lower-case letters only, so that its answers are text.
TinyModel tiny_chat_model();

}  // namespace longkv::test
