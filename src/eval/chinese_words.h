// Chinese text as words, equal to cut() of the Python package jieba 0.42.1, whose dictionary and tables the user has.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "longkv/status.h"

namespace longkv {

// Of all ways to cut a run of characters into words of the dictionary the one of largest product of frequencies is
// taken; what falls into single characters there is cut anew by a hidden Markov model whose states are begin, middle
// and end of a word and a word of one character.
class ChineseWords {
 public:
  // The package's folder: dict.txt, finalseg/prob_start.py, prob_trans.py and prob_emit.py. Errors: kIo, kCorrupt.
  static Result<std::shared_ptr<const ChineseWords>> open(const std::string& folder);
  // Where pip (of the active environment, of the machine) and Debian put it; empty: nowhere.
  static std::string installed();

  // Blanks and punctuation are words too. Bytes that are no UTF-8 become U+FFFD.
  std::vector<std::string> cut(std::string_view text) const;
  const std::string& sha256() const { return sha256_; }  // of dict.txt

 private:
  enum State { kBegin, kMiddle, kEnd, kSingle, kStates };
  struct Text;  // characters and where they stand

  Status read_dictionary(const std::string& path);
  Status read_tables(const std::string& folder);
  // 0: not a word, but the beginning of one; -1: neither.
  int64_t frequency(std::string_view word) const;
  void cut_run(const Text& text, size_t begin, size_t end, std::vector<std::string>& out) const;
  // Characters that the dictionary left single.
  void cut_rest(const Text& text, size_t begin, size_t end, std::vector<std::string>& out) const;
  void cut_unknown(const Text& text, size_t begin, size_t end, std::vector<std::string>& out) const;

  std::string sha256_, dictionary_;
  std::unordered_map<std::string_view, int64_t> words_;  // and all their beginnings; views of dictionary_
  double log_total_ = 0;
  std::array<double, kStates> start_{};
  std::array<std::array<double, kStates>, kStates> step_{};  // from, to
  std::array<std::unordered_map<uint32_t, double>, kStates> emit_;
};

}  // namespace longkv
