// Graded comparisons of texts: LongBench's, equal to the Python packages that its tables were made with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace longkv {

// SQuAD's normalisation: lower case, no ASCII punctuation, no articles, words. Then F1 over the words in common.
double f1_score(std::string_view output, std::string_view reference);
// The same over single characters, without punctuation and blanks: for Chinese where jieba's dictionary is not at hand.
double f1_characters(std::string_view output, std::string_view reference);
// LongBench's for Chinese, over words that jieba cut (ChineseWords).
double f1_chinese(const std::vector<std::string>& output, const std::vector<std::string>& reference);
// F of the package "rouge" 1.0.1: sentences end at full stops, union of longest common subsequences as sets of words.
double rouge_l(std::string_view output, std::string_view reference);
double rouge_l_characters(std::string_view output, std::string_view reference);
// 2 * longest common subsequence of characters / both lengths (rapidfuzz's ratio / 100; 1 for two empty texts).
double indel_ratio(std::string_view a, std::string_view b);
// The first line of code, its ratio rounded to whole percents.
double code_similarity(std::string_view output, std::string_view reference);
// 1 - Levenshtein distance / the longer length.
double edit_similarity(std::string_view a, std::string_view b);

// Words as Python's str.split() gives them.
std::vector<std::string> python_words(std::string_view text);

}  // namespace longkv
