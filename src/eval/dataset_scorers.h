// Rules of LongBench, InfiniteBench, NeedleBench and GSM-Infinite.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "eval/sample.h"

namespace longkv {

double score_dataset_answer(EvalMetric metric, std::string_view output, const std::vector<std::string>& references,
                            const std::vector<std::string>& classes, const ChineseWords* words);

}  // namespace longkv
