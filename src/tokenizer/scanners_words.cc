// Scanners that split a text into words in one pass: GPT-2's rule and the family that follows Llama 3's.
#include <algorithm>

#include "tokenizer/scanners.h"

namespace longkv::scan {

namespace {

bool line_break(const Char& c) { return c.code == '\r' || c.code == '\n'; }

// ASCII letters to lower case; U+017F (long s) folds to s in the case-insensitive matching of the original patterns.
uint32_t fold(uint32_t code) {
  if (code >= 'A' && code <= 'Z') return code + 32;
  return code == 0x17F ? 's' : code;
}

// End of 's 't 're 've 'm 'll 'd at pos, or pos.
size_t contraction(const CharReader& text, size_t pos, bool ignore_case) {
  if (text.at(pos).code != '\'') return pos;
  const Char first = text.at(pos + 1);
  const Char second = text.at(pos + 1 + first.length);
  const uint32_t a = ignore_case ? fold(first.code) : first.code;
  const uint32_t b = ignore_case ? fold(second.code) : second.code;
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return pos + 1 + first.length;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) {
    return pos + 1 + first.length + second.length;
  }
  return pos;
}

// \s+(?!\S)|\s+ : a run of white space leaves its last character to the word after it.
size_t white_space(const CharReader& text, size_t pos) {
  size_t last = pos;
  size_t end = pos;
  for (Char c = text.at(end); c.is(kSpace); c = text.at(end)) {
    last = end;
    end += c.length;
  }
  return end == text.end() || last == pos ? end : last;
}

// \s*[\r\n]+|\s+(?!\S)|\s+ : white space up to its last line break goes together.
size_t white_space_by_line(const CharReader& text, size_t pos) {
  size_t last = pos;
  size_t end = pos;
  size_t after_break = pos;
  for (Char c = text.at(end); c.is(kSpace); c = text.at(end)) {
    last = end;
    end += c.length;
    if (line_break(c)) after_break = end;
  }
  if (after_break > pos) return after_break;
  return end == text.end() || last == pos ? end : last;
}

size_t number_group(const CharReader& text, size_t pos, int max_digits) {
  for (int i = 0; i < max_digits; ++i) {
    const Char c = text.at(pos);
    if (!c.is(kNumber)) break;
    pos += c.length;
  }
  return pos;
}

// " ?[^\s letters numbers]+" with a tail of line breaks (and slashes); pos if there is none.
size_t other_run(const CharReader& text, size_t pos, unsigned word_bits, bool slashes) {
  const Char c = text.at(pos);
  const size_t start = c.code == ' ' ? pos + 1 : pos;
  const size_t end = text.run(start, [&](const Char& d) { return !d.is(word_bits | kNumber | kSpace); });
  if (end == start) return pos;
  return text.run(end, [&](const Char& d) { return line_break(d) || (slashes && d.code == '/'); });
}

size_t llama3_like(const CharReader& text, size_t pos, int max_digits, unsigned word_bits) {
  if (const size_t end = contraction(text, pos, true); end > pos) return end;
  const auto letter = [&](const Char& c) { return c.is(word_bits); };
  const Char c = text.at(pos);
  // [^\r\n\p{L}\p{N}]? takes the first character unless it is a letter; a mark that is itself a word character too.
  if (!c.is(kNumber) && !line_break(c)) {
    const size_t start = c.is(kLetter) ? pos : pos + c.length;
    const size_t end = text.run(start, letter);
    if (end > start) return end;
    if (letter(c)) return pos + c.length;
  }
  if (c.is(kNumber)) return number_group(text, pos, max_digits);
  if (const size_t end = other_run(text, pos, word_bits, false); end > pos) return end;
  if (c.is(kSpace)) return white_space_by_line(text, pos);
  return pos + c.length;
}

bool upper_like(const Char& c) { return c.is(kMark) || (c.is(kLetter) && !c.is(kLower)); }
bool lower_like(const Char& c) { return c.is(kMark) || (c.is(kLetter) && !c.is(kUpper)); }

// U*W+ from start, or start. U* gives back characters until one that is also in W can begin W+.
size_t upper_then_lower(const CharReader& text, size_t start) {
  size_t pos = start;
  size_t after_shared = start;  // end of the last character that is in U and in W
  for (Char c = text.at(pos); c.length != 0 && upper_like(c); c = text.at(pos)) {
    pos += c.length;
    if (lower_like(c)) after_shared = pos;
  }
  const size_t end = text.run(pos, lower_like);
  return end > pos ? end : after_shared;
}

// U+W* from start, or start.
size_t upper_with_tail(const CharReader& text, size_t start) {
  const size_t pos = text.run(start, upper_like);
  return pos == start ? start : text.run(pos, lower_like);
}

// A word by letter case with an optional leading character, or pos.
size_t cased_word(const CharReader& text, size_t pos) {
  const Char c = text.at(pos);
  const bool may_lead = c.length != 0 && !c.is(kLetter | kNumber) && !line_break(c);
  const size_t lead_end = pos + c.length;
  for (const auto word : {upper_then_lower, upper_with_tail}) {
    if (may_lead) {
      if (const size_t end = word(text, lead_end); end > lead_end) return end;
    }
    if (const size_t end = word(text, pos); end > pos) return end;
  }
  return pos;
}

size_t tekken_like(const CharReader& text, size_t pos, int max_digits, bool contractions) {
  if (const size_t end = cased_word(text, pos); end > pos) return contractions ? contraction(text, end, true) : end;
  const Char c = text.at(pos);
  if (c.is(kNumber)) return number_group(text, pos, max_digits);
  if (const size_t end = other_run(text, pos, kLetter, true); end > pos) return end;
  if (c.is(kSpace)) return white_space_by_line(text, pos);
  return pos + c.length;
}

}  // namespace

size_t gpt2(const CharReader& text, size_t pos) {
  if (const size_t end = contraction(text, pos, false); end > pos) return end;
  const Char c = text.at(pos);
  const size_t start = c.code == ' ' ? pos + 1 : pos;
  const Char first = start == pos ? c : text.at(start);
  if (first.length != 0 && !first.is(kSpace)) {
    if (first.is(kLetter)) return text.run(start, [](const Char& d) { return d.is(kLetter); });
    if (first.is(kNumber)) return text.run(start, [](const Char& d) { return d.is(kNumber); });
    return text.run(start, [](const Char& d) { return !d.is(kLetter | kNumber | kSpace); });
  }
  return white_space(text, pos);
}

size_t llama3(const CharReader& text, size_t pos) { return llama3_like(text, pos, 3, kLetter); }
size_t qwen2(const CharReader& text, size_t pos) { return llama3_like(text, pos, 1, kLetter); }
size_t qwen35(const CharReader& text, size_t pos) { return llama3_like(text, pos, 1, kLetter | kMark); }
size_t tekken(const CharReader& text, size_t pos) { return tekken_like(text, pos, 1, false); }
size_t gpt4o(const CharReader& text, size_t pos) { return tekken_like(text, pos, 3, true); }

}  // namespace longkv::scan
