// A seeded grammar of chapters: who came where, what was bought and sold, and what else happened. Its facts are known,
// so questions can be asked about the filler itself; its text is in no training set and never repeats.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "eval/random.h"

namespace longkv {

struct StoryChapter {
  std::string person, place, bought, sold;  // `bought` is empty in chapters without a purchase
  std::vector<std::string> sentences;       // the facts are in the second and the last but one
};

// Sentences of plain narration, without facts that any task asks for.
std::string story_sentence(EvalRandom& random);

// Chapters with different people, at most story_chapters_limit(); `quiet` holds the numbers of those without a
// purchase.
std::vector<StoryChapter> story_chapters(EvalRandom& random, int64_t n, const std::vector<int64_t>& quiet,
                                         int64_t sentences);
int64_t story_chapters_limit();

}  // namespace longkv
