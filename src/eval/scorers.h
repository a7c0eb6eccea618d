// How an answer is judged: rules of the benchmarks, each on strings alone.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "eval/sample.h"

namespace longkv {

// 0 to 1. `distractors` are the classes of kClass, `words` is needed by kF1Jieba and kRougeLJieba.
// kNegativeLogLikelihood is not judged by text and gives 0.
double score_answer(EvalMetric metric, std::string_view output, const std::vector<std::string>& references,
                    const std::vector<std::string>& distractors = {}, const ChineseWords* words = nullptr);

// The output up to the sample's stop; what of it follows is nobody's answer.
std::string_view cut_at_stop(std::string_view output, std::string_view stop);
// Whether the output holds the stop already: generation may end.
bool meets_stop(std::string_view output, std::string_view stop);

// How many of `references` and `distractors` occur: an answer that names more than it should is flagged.
int64_t named_candidates(std::string_view output, const std::vector<std::string>& references,
                         const std::vector<std::string>& distractors);

}  // namespace longkv
