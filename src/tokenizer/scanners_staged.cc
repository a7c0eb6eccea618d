// Scanners of the pre-tokenizers that split in several passes: each pass is a run of one set, or what lies between.
#include <algorithm>
#include <iterator>

#include "tokenizer/scanners.h"

namespace longkv::scan {

namespace {

struct CodeRange {
  uint32_t first;
  uint32_t last;
};

// The letters that DeepSeek-LLM's tokenizer lists: cased letters, without later additions to Unicode.
constexpr CodeRange kDeepSeekLetters[] = {
    {0x41, 0x5A},       {0x61, 0x7A},       {0xB5, 0xB5},       {0xC0, 0xD6},       {0xD8, 0xF6},
    {0xF8, 0x1BA},      {0x1BC, 0x1BF},     {0x1C4, 0x293},     {0x295, 0x2AF},     {0x370, 0x373},
    {0x376, 0x376},     {0x377, 0x377},     {0x37B, 0x37D},     {0x37F, 0x37F},     {0x386, 0x386},
    {0x388, 0x38A},     {0x38C, 0x38C},     {0x38E, 0x3A1},     {0x3A3, 0x3F5},     {0x3F7, 0x481},
    {0x48A, 0x52F},     {0x531, 0x556},     {0x10A0, 0x10C5},   {0x13A0, 0x13F5},   {0x13F8, 0x13FD},
    {0x1C90, 0x1CBA},   {0x1CBD, 0x1CBF},   {0x1D00, 0x1D2B},   {0x1D6B, 0x1D77},   {0x1D79, 0x1D9A},
    {0x1E00, 0x1F15},   {0x1F18, 0x1F1D},   {0x1F20, 0x1F45},   {0x1F48, 0x1F4D},   {0x1F50, 0x1F57},
    {0x1F59, 0x1F59},   {0x1F5B, 0x1F5B},   {0x1F5D, 0x1F5D},   {0x1F5F, 0x1F7D},   {0x1F80, 0x1FB4},
    {0x1FB6, 0x1FBC},   {0x1FBE, 0x1FBE},   {0x1FC2, 0x1FC4},   {0x1FC6, 0x1FCC},   {0x1FD0, 0x1FD3},
    {0x1FD6, 0x1FDB},   {0x1FE0, 0x1FEC},   {0x1FF2, 0x1FF4},   {0x1FF6, 0x1FFC},   {0x2102, 0x2102},
    {0x2107, 0x2107},   {0x210A, 0x2113},   {0x2115, 0x2115},   {0x2119, 0x211D},   {0x2124, 0x2124},
    {0x2126, 0x2126},   {0x2128, 0x2128},   {0x212A, 0x212D},   {0x212F, 0x2134},   {0x2139, 0x2139},
    {0x213C, 0x213F},   {0x2145, 0x2149},   {0x214E, 0x214E},   {0x2183, 0x2183},   {0x2184, 0x2184},
    {0x2C00, 0x2C7B},   {0x2C7E, 0x2CE4},   {0x2CEB, 0x2CEE},   {0x2CF2, 0x2CF2},   {0x2CF3, 0x2CF3},
    {0xA640, 0xA66D},   {0xA680, 0xA69B},   {0xA722, 0xA76F},   {0xA771, 0xA787},   {0xA78B, 0xA78E},
    {0xAB70, 0xABBF},   {0xFB00, 0xFB06},   {0xFB13, 0xFB17},   {0xFF21, 0xFF3A},   {0xFF41, 0xFF5A},
    {0x10400, 0x1044F}, {0x104B0, 0x104D3}, {0x104D8, 0x104FB}, {0x10C80, 0x10CB2}, {0x10CC0, 0x10CF2},
    {0x118A0, 0x118DF}, {0x1E900, 0x1E943},
};

constexpr CodeRange kDeepSeekMarks[] = {{0x21, 0x2F},     {0x3A, 0x7E},     {0x2018, 0x201F},
                                        {0x3000, 0x3002}, {0xFF01, 0xFF0F}, {0xFF1A, 0xFF5E}};

template <size_t N>
bool in_ranges(const CodeRange (&ranges)[N], uint32_t code) {
  const auto* it = std::upper_bound(std::begin(ranges), std::end(ranges), code,
                                    [](uint32_t c, const CodeRange& range) { return c < range.first; });
  return it != std::begin(ranges) && code <= std::prev(it)->last;
}

// Pattern X+ : a run inside the set, else the run outside of it.
template <class Predicate>
size_t run_or_gap(const CharReader& text, size_t pos, Predicate in) {
  const size_t end = text.run(pos, in);
  if (end > pos) return end;
  return text.run(pos, [&](const Char& c) { return !in(c); });
}

// Pattern X : one character inside the set, else the run outside of it.
template <class Predicate>
size_t one_or_gap(const CharReader& text, size_t pos, Predicate in) {
  const Char c = text.at(pos);
  if (in(c)) return pos + c.length;
  return text.run(pos, [&](const Char& d) { return !in(d); });
}

// Pattern \s?X+ : the gap ends where a match begins, which is one character early when a space precedes it.
template <class Predicate>
size_t spaced_run_or_gap(const CharReader& text, size_t pos, Predicate in) {
  const auto match_end = [&](size_t at) -> size_t {
    const Char c = text.at(at);
    if (c.is(kSpace)) {
      const size_t end = text.run(at + c.length, in);
      if (end > at + c.length) return end;
    }
    return in(c) ? text.run(at, in) : at;
  };
  if (const size_t end = match_end(pos); end > pos) return end;
  while (pos < text.end()) {
    const Char c = text.at(pos);
    if (in(c) || (c.is(kSpace) && in(text.at(pos + c.length)))) break;
    pos += c.length;
  }
  return pos;
}

bool ascii_digit(const Char& c) { return c.code >= '0' && c.code <= '9'; }

bool default_punctuation(const Char& c) {
  switch (c.code) {
    case '$':
    case '+':
    case '<':
    case '=':
    case '>':
    case '^':
    case '~':
    case '|': return true;
    default: return c.is(kPunct);
  }
}

}  // namespace

size_t one_number(const CharReader& text, size_t pos) {
  return one_or_gap(text, pos, [](const Char& c) { return c.is(kNumber); });
}

size_t numbers(const CharReader& text, size_t pos) {
  return run_or_gap(text, pos, [](const Char& c) { return c.is(kNumber); });
}

size_t three_digits(const CharReader& text, size_t pos) {
  const auto three_at = [&](size_t at) {
    return ascii_digit(text.at(at)) && ascii_digit(text.at(at + 1)) && ascii_digit(text.at(at + 2));
  };
  if (three_at(pos)) return pos + 3;
  while (pos < text.end() && !three_at(pos)) pos += text.at(pos).length;
  return pos;
}

size_t one_line_break(const CharReader& text, size_t pos) {
  return one_or_gap(text, pos, [](const Char& c) { return c.code == '\r' || c.code == '\n'; });
}

size_t punctuation_falcon(const CharReader& text, size_t pos) {
  return run_or_gap(text, pos, [](const Char& c) { return default_punctuation(c) || c.code == '`'; });
}

size_t punctuation_default(const CharReader& text, size_t pos) { return run_or_gap(text, pos, default_punctuation); }

size_t spaced_letters(const CharReader& text, size_t pos) {
  return spaced_run_or_gap(text, pos, [](const Char& c) { return c.is(kLetter); });
}

size_t spaced_punctuation(const CharReader& text, size_t pos) {
  return spaced_run_or_gap(text, pos, [](const Char& c) { return c.is(kPunct); });
}

size_t spaced_cased_letters(const CharReader& text, size_t pos) {
  return spaced_run_or_gap(text, pos, [](const Char& c) {
    if (c.code < 0x80) return c.is(kLetter);
    return in_ranges(kDeepSeekLetters, c.code);
  });
}

size_t spaced_marks_ascii(const CharReader& text, size_t pos) {
  return spaced_run_or_gap(text, pos, [](const Char& c) { return in_ranges(kDeepSeekMarks, c.code); });
}

size_t trailing_space(const CharReader& text, size_t pos) {
  const auto space = [](const Char& c) { return c.is(kSpace); };
  if (text.run(pos, space) == text.end()) return text.end();
  // Walk run by run, so that a run in the middle is read once.
  while (pos < text.end()) {
    const Char c = text.at(pos);
    if (!c.is(kSpace)) {
      pos += c.length;
      continue;
    }
    const size_t run_end = text.run(pos, space);
    if (run_end == text.end()) return pos;
    pos = run_end;
  }
  return pos;
}

size_t east_asian(const CharReader& text, size_t pos) {
  return run_or_gap(text, pos, [](const Char& c) {
    return (c.code >= 0x800 && c.code <= 0x9FA5) || (c.code >= 0xAC00 && c.code <= 0xD7FF);
  });
}

}  // namespace longkv::scan
