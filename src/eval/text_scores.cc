#include "eval/text_scores.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "eval/text.h"
#include "tokenizer/unicode.h"

namespace longkv {

namespace {

using Codes = std::vector<uint32_t>;

uint8_t class_of(uint32_t code) { return code < 0x110000 ? char_class_table()[code] : 0; }
bool is_space(uint32_t c) { return (class_of(c) & kSpace) != 0 || (c >= 0x1c && c <= 0x1f); }
// \w of Python's regular expressions.
bool is_word(uint32_t c) { return c == '_' || (class_of(c) & (kLetter | kNumber)) != 0; }
bool is_ascii_punctuation(uint32_t c) { return c > ' ' && c < 0x7f && (class_of(c) & (kPunct | kSymbol)) != 0; }

// Lower case of ASCII, Latin, Greek and Cyrillic letters; other scripts with two cases stay as they are.
uint32_t lower(uint32_t c) {
  if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
  if (c >= 0xc0 && c <= 0xde && c != 0xd7) return c + 32;
  if (c >= 0x100 && c <= 0x137 && c != 0x130) return c | 1;
  if ((c >= 0x139 && c <= 0x148) || (c >= 0x179 && c <= 0x17e)) return c % 2 == 1 ? c + 1 : c;
  if (c >= 0x14a && c <= 0x177) return c | 1;
  if (c == 0x178) return 0xff;
  if (c >= 0x391 && c <= 0x3a9 && c != 0x3a2) return c + 32;
  if (c >= 0x400 && c <= 0x40f) return c + 80;
  if (c >= 0x410 && c <= 0x42f) return c + 32;
  return c;
}

std::vector<std::string> words_of(const Codes& codes) {
  std::vector<std::string> words;
  bool inside = false;
  for (const uint32_t c : codes) {
    if (is_space(c)) {
      inside = false;
      continue;
    }
    if (!inside) words.emplace_back();
    inside = true;
    append_utf8(words.back(), c);
  }
  return words;
}

// Words of a normalised answer.
std::vector<std::string> normalised(std::string_view text) {
  Codes codes;
  for (const uint32_t c : code_points(text)) {
    if (const uint32_t l = lower(c); !is_ascii_punctuation(l)) codes.push_back(l);
  }
  // Articles as whole words become blanks.
  for (size_t i = 0; i < codes.size();) {
    size_t end = i;
    while (end < codes.size() && is_word(codes[end])) ++end;
    std::string word;
    for (size_t k = i; k < end && k < i + 4; ++k) append_utf8(word, codes[k]);
    if (word == "a" || word == "an" || word == "the")
      std::fill(codes.begin() + int64_t(i), codes.begin() + int64_t(end), ' ');
    i = std::max(end, i + 1);
  }
  return words_of(codes);
}

double f1(const std::vector<std::string>& output, const std::vector<std::string>& reference) {
  std::map<std::string, int64_t> counts;
  for (const std::string& w : reference) ++counts[w];
  int64_t same = 0;
  for (const std::string& w : output) {
    if (auto found = counts.find(w); found != counts.end() && found->second > 0) {
      --found->second;
      ++same;
    }
  }
  if (same == 0) return 0;
  const double precision = double(same) / double(output.size()), recall = double(same) / double(reference.size());
  return 2 * precision * recall / (precision + recall);
}

// Characters without punctuation and blanks, in lower case.
std::vector<std::string> characters(std::string_view text) {
  std::vector<std::string> out;
  for (const uint32_t c : code_points(text)) {
    if (is_space(c) || (class_of(c) & kPunct) != 0 || is_ascii_punctuation(c)) continue;
    out.emplace_back();
    append_utf8(out.back(), lower(c));
  }
  return out;
}

// What LongBench removes from Chinese words beside ASCII punctuation. Titles' opening brackets are not among it.
bool is_chinese_punctuation(uint32_t c) {
  static const std::vector<uint32_t> kMarks = code_points(
      "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞"
      "〟〰〾〿–—‘’‛“”„‟…‧﹏");
  return std::find(kMarks.begin(), kMarks.end(), c) != kMarks.end();
}

std::vector<std::string> normalised_chinese(const std::vector<std::string>& words) {
  std::vector<std::string> out;
  for (const std::string& word : words) {
    std::string kept;
    for (const uint32_t c : code_points(word)) {
      if (!is_space(c) && !is_ascii_punctuation(c) && !is_chinese_punctuation(c)) append_utf8(kept, lower(c));
    }
    if (!kept.empty()) out.push_back(std::move(kept));
  }
  return out;
}

// Words of the longest common subsequence that a walk back from the ends finds, preferring to drop a word of `b`. Which
// of several longest ones it is decides the union over sentences.
void add_common(const std::vector<std::string>& a, const std::vector<std::string>& b, std::set<std::string>& into) {
  const size_t n = a.size(), m = b.size();
  std::vector<uint32_t> table((n + 1) * (m + 1), 0);
  const auto at = [&](size_t i, size_t j) -> uint32_t& { return table[i * (m + 1) + j]; };
  for (size_t i = 1; i <= n; ++i) {
    for (size_t j = 1; j <= m; ++j) {
      at(i, j) = a[i - 1] == b[j - 1] ? at(i - 1, j - 1) + 1 : std::max(at(i - 1, j), at(i, j - 1));
    }
  }
  for (size_t i = n, j = m; i > 0 && j > 0;) {
    if (a[i - 1] == b[j - 1]) {
      into.insert(a[i - 1]);
      --i;
      --j;
    } else if (at(i - 1, j) > at(i, j - 1)) {
      --i;
    } else {
      --j;
    }
  }
}

using Sentences = std::vector<std::vector<std::string>>;

double rouge_of(const Sentences& output, const Sentences& reference) {
  if (output.empty() || reference.empty()) return 0;
  std::set<std::string> output_words, reference_words, common;
  for (const auto& s : output) output_words.insert(s.begin(), s.end());
  for (const auto& s : reference) reference_words.insert(s.begin(), s.end());
  for (const auto& r : reference) {
    for (const auto& o : output) add_common(r, o, common);
  }
  const double recall = double(common.size()) / double(reference_words.size());
  const double precision = double(common.size()) / double(output_words.size());
  return 2 * (precision * recall / (precision + recall + 1e-8));
}

Sentences word_sentences(std::string_view text) {
  Sentences sentences;
  while (true) {
    const size_t end = text.find('.');
    const std::string_view part = text.substr(0, end);
    if (!part.empty()) {
      sentences.push_back(python_words(part));
      // A sentence of blanks alone is one empty word there.
      if (sentences.back().empty()) sentences.back().emplace_back();
    }
    if (end == std::string_view::npos) return sentences;
    text.remove_prefix(end + 1);
  }
}

int64_t common_length(const Codes& a, const Codes& b) {
  std::vector<int64_t> row(b.size() + 1, 0);
  for (const uint32_t c : a) {
    int64_t diagonal = 0;
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t above = row[j];
      row[j] = c == b[j - 1] ? diagonal + 1 : std::max(row[j], row[j - 1]);
      diagonal = above;
    }
  }
  return row.back();
}

}  // namespace

std::vector<std::string> python_words(std::string_view text) { return words_of(code_points(text)); }

double f1_score(std::string_view output, std::string_view reference) {
  return f1(normalised(output), normalised(reference));
}

double f1_characters(std::string_view output, std::string_view reference) {
  return f1(characters(output), characters(reference));
}

double f1_chinese(const std::vector<std::string>& output, const std::vector<std::string>& reference) {
  return f1(normalised_chinese(output), normalised_chinese(reference));
}

double rouge_l(std::string_view output, std::string_view reference) {
  return rouge_of(word_sentences(output), word_sentences(reference));
}

double rouge_l_characters(std::string_view output, std::string_view reference) {
  const auto sentence = [](std::string_view text) {
    Sentences s;
    if (auto c = characters(text); !c.empty()) s.push_back(std::move(c));
    return s;
  };
  return rouge_of(sentence(output), sentence(reference));
}

double indel_ratio(std::string_view a, std::string_view b) {
  const Codes x = code_points(a), y = code_points(b);
  if (x.empty() && y.empty()) return 1;
  return 2.0 * double(common_length(x, y)) / double(x.size() + y.size());
}

double code_similarity(std::string_view output, std::string_view reference) {
  output.remove_prefix(std::min(output.find_first_not_of('\n'), output.size()));
  std::string code;
  for (const std::string& line : split_lines(output)) {
    if (line.find('`') != std::string::npos || line.find('#') != std::string::npos ||
        line.find("//") != std::string::npos) {
      continue;
    }
    code = line;
    break;
  }
  return std::nearbyint(100 * indel_ratio(code, reference)) / 100;
}

double edit_similarity(std::string_view a, std::string_view b) {
  const Codes x = code_points(a), y = code_points(b);
  if (x.empty() && y.empty()) return 1;
  std::vector<int64_t> row(y.size() + 1);
  for (size_t j = 0; j <= y.size(); ++j) row[j] = int64_t(j);
  for (size_t i = 1; i <= x.size(); ++i) {
    int64_t diagonal = row[0];
    row[0] = int64_t(i);
    for (size_t j = 1; j <= y.size(); ++j) {
      const int64_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (x[i - 1] == y[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return 1 - double(row.back()) / double(std::max(x.size(), y.size()));
}

}  // namespace longkv
