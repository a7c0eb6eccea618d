// The split rules of pre-tokenizers as linear scanners.
//
// A scanner gets a position inside a segment and returns where the piece that starts there ends; a piece is a match of
// its pattern or the text between two matches. Each scanner gives the pieces of the regular expression named beside it,
// looks ahead only as far as the piece it returns plus one run, keeps no state and never recurses.
#pragma once

#include <cstddef>

#include "tokenizer/unicode.h"

namespace longkv {

using Scanner = size_t (*)(const CharReader& text, size_t pos);

namespace scan {

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t gpt2(const CharReader& text, size_t pos);

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
size_t llama3(const CharReader& text, size_t pos);
// The same with \p{N} instead of \p{N}{1,3}.
size_t qwen2(const CharReader& text, size_t pos);
// qwen2 with [\p{L}\p{M}]+ as letters and [^\s\p{L}\p{M}\p{N}]+ as other characters.
size_t qwen35(const CharReader& text, size_t pos);
// [^\r\n\p{L}\p{N}]?U*W+|[^\r\n\p{L}\p{N}]?U+W*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
// where U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] and W = [\p{Ll}\p{Lm}\p{Lo}\p{M}]
size_t tekken(const CharReader& text, size_t pos);
// tekken with \p{N}{1,3} and an optional (?i:'s|'t|'re|'ve|'m|'ll|'d) after a word.
size_t gpt4o(const CharReader& text, size_t pos);

size_t one_number(const CharReader& text, size_t pos);            // \p{N}
size_t numbers(const CharReader& text, size_t pos);               // \p{N}+
size_t three_digits(const CharReader& text, size_t pos);          // [0-9][0-9][0-9]
size_t one_line_break(const CharReader& text, size_t pos);        // [\r\n]
size_t punctuation_falcon(const CharReader& text, size_t pos);    // [\p{P}\$\+<=>\^~\|`]+
size_t punctuation_default(const CharReader& text, size_t pos);   // [\p{P}\$\+<=>\^~\|]+
size_t spaced_letters(const CharReader& text, size_t pos);        // \s?\p{L}+
size_t spaced_punctuation(const CharReader& text, size_t pos);    // \s?\p{P}+
size_t spaced_cased_letters(const CharReader& text, size_t pos);  // \s?[cased letters of DeepSeek-LLM]+
size_t spaced_marks_ascii(const CharReader& text, size_t pos);  // \s?[!-/:-~ and full-width forms, quotes, CJK stops]+
size_t trailing_space(const CharReader& text, size_t pos);      // \s+$
size_t east_asian(const CharReader& text, size_t pos);          // [U+0800-U+9FA5 U+AC00-U+D7FF]+

}  // namespace scan
}  // namespace longkv
