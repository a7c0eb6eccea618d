// Texts to learn from, made offline: a long document and questions about it whose answers are known.
//
// Three kinds take turns by index: key-value pairs (every line can be asked for), sentences with numbers hidden in
// running text, chains of variables. A fourth, continuation, comes from the user's own files: nothing is asked, the
// chunks are what the text says next, at several places of the document; texts take turns. Everything follows from
// (seed, index); seeds come from the half that belongs to learning (SeedSpace::kTrain), so that no text is one that an
// evaluation makes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "longkv/status.h"
#include "tokenizer/tokenizer.h"

namespace longkv {

struct Question {
  std::vector<int32_t> ids;  // question and answer
  int64_t loss_from = 0;     // row i predicts ids[i + 1]; rows from here on, the last one excepted, count
  int64_t after = 0;         // tokens of the document before it
};

struct Lesson {
  std::string kind;  // "pairs", "numbers", "chains" or "text"
  std::vector<int32_t> document;
  std::vector<Question> questions;
};

struct LessonOptions {
  uint64_t seed = 1;
  int64_t questions = 16;
  int64_t max_chunk = 224;         // tokens of question and answer; longer ones are left out
  std::vector<std::string> texts;  // the user's own; empty: generated kinds only
  bool generated = true;           // false: the user's own only
};

// Kinds that take turns: lesson `index` is of kind index % lesson_kinds().
inline int64_t lesson_kinds(const LessonOptions& options) {
  return (options.generated ? 3 : 0) + (options.texts.empty() ? 0 : 1);
}

// What a lesson's random numbers follow from.
uint64_t lesson_seed(uint64_t seed, uint64_t index);

// A lesson whose document has at most `tokens` tokens and at least nine tenths of them.
// Errors: kInvalidArgument when `tokens` is too small or the user's texts are shorter than that.
Result<Lesson> make_lesson(const Tokenizer& tokenizer, const LessonOptions& options, uint64_t index, int64_t tokens);

}  // namespace longkv
