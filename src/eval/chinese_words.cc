#include "eval/chinese_words.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "base/error.h"
#include "base/trim.h"
#include "base/utf8.h"
#include "eval/sha256.h"
#include "eval/text.h"

namespace longkv {

namespace {

namespace fs = std::filesystem;

// The logarithm of what never happens.
constexpr double kNever = -3.14e100;
constexpr uint64_t kMaxFile = uint64_t(1) << 28;

bool is_han(uint32_t c) { return c >= 0x4e00 && c <= 0x9fd5; }
bool is_ascii_digit(uint32_t c) { return c >= '0' && c <= '9'; }
bool is_ascii_alnum(uint32_t c) { return is_ascii_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_in_words(uint32_t c) {
  return is_han(c) || is_ascii_alnum(c) || c == '+' || c == '#' || c == '&' || c == '.' || c == '_' || c == '%' ||
         c == '-';
}

// P={'B': {'\u4e00': -3.65, ...}, ...}: calls visit(outer key or "", inner key, value).
Status read_python_table(const std::string& path,
                         const std::function<bool(const std::string&, const std::string&, double)>& visit) {
  LONGKV_ASSIGN(const std::string text, read_packed_file(path, kMaxFile));
  const auto damaged = [&](size_t at) { return fail(Code::kCorrupt, "'{}' byte {}: no table of jieba's", path, at); };
  const auto skip_blanks = [&](size_t at) { return std::min(text.find_first_not_of(" \t\r\n", at), text.size()); };
  std::string outer;
  int64_t entries = 0;
  for (size_t i = text.find("P={"); i < text.size(); ++i) {
    if (text[i] == '}') outer.clear();
    if (text[i] != '\'') continue;
    const size_t end = text.find('\'', i + 1);
    if (end == std::string::npos) return damaged(i);
    std::string key = text.substr(i + 1, end - i - 1);
    if (key.starts_with("\\u")) {
      uint32_t code = 0;
      const char* last = key.data() + key.size();
      if (key.size() != 6 || std::from_chars(key.data() + 2, last, code, 16).ptr != last) return damaged(i);
      key.clear();
      append_utf8(key, code);
    }
    size_t value = skip_blanks(end + 1);
    if (value >= text.size() || text[value] != ':') return damaged(value);
    value = skip_blanks(value + 1);
    if (value < text.size() && text[value] == '{') {
      outer = key;
      i = value;
      continue;
    }
    double number = 0;
    const auto parsed = std::from_chars(text.data() + value, text.data() + text.size(), number);
    if (parsed.ec != std::errc() || !visit(outer, key, number)) return damaged(value);
    ++entries;
    i = size_t(parsed.ptr - text.data()) - 1;
  }
  return entries > 0 ? Status() : damaged(0);
}

// 0 to 3 for B, M, E, S.
int state_of(const std::string& name) {
  const size_t at = name.size() == 1 ? std::string_view("BMES").find(name[0]) : std::string_view::npos;
  return at == std::string_view::npos ? -1 : int(at);
}

void add_packages(const fs::path& root, std::vector<std::string>& found) {
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    if (!it->path().filename().string().starts_with("python3")) continue;
    for (const char* packages : {"site-packages", "dist-packages"}) {
      const fs::path folder = it->path() / packages / "jieba";
      std::error_code ignored;
      if (fs::is_regular_file(folder / "dict.txt", ignored)) found.push_back(folder.string());
    }
  }
}

}  // namespace

struct ChineseWords::Text {
  explicit Text(std::string_view text) : codes(code_points(text)) {
    for (const uint32_t c : codes) {
      at.push_back(bytes.size());
      append_utf8(bytes, c);
    }
    at.push_back(bytes.size());
  }
  std::string_view word(size_t begin, size_t end) const {
    return std::string_view(bytes).substr(at[begin], at[end] - at[begin]);
  }

  std::vector<uint32_t> codes;
  std::string bytes;
  std::vector<size_t> at;
};

std::string ChineseWords::installed() {
  std::vector<std::string> found;
  if (const char* active = std::getenv("VIRTUAL_ENV")) add_packages(fs::path(active) / "lib", found);
  if (const char* home = std::getenv("HOME")) add_packages(fs::path(home) / ".local/lib", found);
  add_packages("/usr/local/lib", found);
  add_packages("/usr/lib", found);
  return found.empty() ? "" : found.front();
}

Result<std::shared_ptr<const ChineseWords>> ChineseWords::open(const std::string& folder) {
  const auto words = std::make_shared<ChineseWords>();
  LONGKV_TRY(words->read_dictionary(folder + "/dict.txt"));
  LONGKV_TRY(words->read_tables(folder + "/finalseg"));
  return std::shared_ptr<const ChineseWords>(words);
}

// Lines "word frequency tag". A later line for a word counts, in the total all do.
Status ChineseWords::read_dictionary(const std::string& path) {
  LONGKV_ASSIGN(dictionary_, read_packed_file(path, kMaxFile));
  sha256_ = longkv::sha256(dictionary_);
  words_.reserve(size_t(1) << 19);
  double total = 0;
  int64_t number = 0;
  for (size_t begin = 0; begin < dictionary_.size();) {
    const size_t end = std::min(dictionary_.find('\n', begin), dictionary_.size());
    const std::string_view line = trim(std::string_view(dictionary_).substr(begin, end - begin));
    begin = end + 1;
    ++number;
    const size_t blank = line.find(' ');
    int64_t count = -1;
    if (blank != std::string_view::npos && blank > 0) {
      const char* last = line.data() + line.size();
      const auto parsed = std::from_chars(line.data() + blank + 1, last, count);
      if (parsed.ec != std::errc() || (parsed.ptr != last && *parsed.ptr != ' ')) count = -1;
    }
    if (count < 0) return fail(Code::kCorrupt, "'{}' line {}: a word and its frequency are expected", path, number);
    const std::string_view word = line.substr(0, blank);
    words_[word] = count;
    total += double(count);
    for (size_t i = 1; i < word.size(); ++i) {
      if ((uint8_t(word[i]) & 0xc0) != 0x80) words_.try_emplace(word.substr(0, i), 0);
    }
  }
  if (total <= 0) return fail(Code::kCorrupt, "'{}' holds no words", path);
  log_total_ = std::log(total);
  return {};
}

Status ChineseWords::read_tables(const std::string& folder) {
  start_.fill(kNever);
  for (auto& row : step_) row.fill(kNever);
  LONGKV_TRY(read_python_table(folder + "/prob_start.py", [&](const auto& outer, const auto& key, double value) {
    const int state = state_of(key);
    if (!outer.empty() || state < 0) return false;
    start_[size_t(state)] = value;
    return true;
  }));
  LONGKV_TRY(read_python_table(folder + "/prob_trans.py", [&](const auto& outer, const auto& key, double value) {
    const int from = state_of(outer), to = state_of(key);
    if (from < 0 || to < 0) return false;
    step_[size_t(from)][size_t(to)] = value;
    return true;
  }));
  return read_python_table(folder + "/prob_emit.py", [&](const auto& outer, const auto& key, double value) {
    const int state = state_of(outer);
    const std::vector<uint32_t> codes = code_points(key);
    if (state < 0 || codes.size() != 1) return false;
    emit_[size_t(state)][codes[0]] = value;
    return true;
  });
}

int64_t ChineseWords::frequency(std::string_view word) const {
  const auto found = words_.find(word);
  return found == words_.end() ? -1 : found->second;
}

std::vector<std::string> ChineseWords::cut(std::string_view text) const {
  const Text t(text);
  std::vector<std::string> out;
  for (size_t i = 0; i < t.codes.size();) {
    size_t end = i;
    while (end < t.codes.size() && is_in_words(t.codes[end])) ++end;
    if (end > i) {
      cut_run(t, i, end, out);
    } else {
      const bool line_end = t.codes[i] == '\r' && i + 1 < t.codes.size() && t.codes[i + 1] == '\n';
      end = i + (line_end ? 2 : 1);
      out.emplace_back(t.word(i, end));
    }
    i = end;
  }
  return out;
}

void ChineseWords::cut_run(const Text& text, size_t begin, size_t end, std::vector<std::string>& out) const {
  // Best sum of logarithms from a character to the end, and where its word ends. Of equal sums the longer word counts.
  const size_t n = end - begin;
  std::vector<double> best(n + 1, 0);
  std::vector<size_t> stop(n + 1, 0);
  for (size_t i = n; i-- > 0;) {
    best[i] = -HUGE_VAL;
    for (size_t last = i; last < n; ++last) {
      const int64_t count = frequency(text.word(begin + i, begin + last + 1));
      if (count < 0) break;
      if (count == 0) continue;
      const double sum = std::log(double(count)) - log_total_ + best[last + 1];
      if (sum >= best[i]) {
        best[i] = sum;
        stop[i] = last + 1;
      }
    }
    if (stop[i] == 0) {
      best[i] = 0 - log_total_ + best[i + 1];
      stop[i] = i + 1;
    }
  }
  size_t rest = 0;  // first of the single characters before i
  for (size_t i = 0; i < n; i = stop[i]) {
    if (stop[i] == i + 1) continue;
    cut_rest(text, begin + rest, begin + i, out);
    out.emplace_back(text.word(begin + i, begin + stop[i]));
    rest = stop[i];
  }
  cut_rest(text, begin + rest, end, out);
}

void ChineseWords::cut_rest(const Text& text, size_t begin, size_t end, std::vector<std::string>& out) const {
  if (end - begin > 1 && frequency(text.word(begin, end)) <= 0) {
    for (size_t i = begin; i < end;) {
      size_t next = i;
      while (next < end && is_han(text.codes[next])) ++next;
      if (next > i) {
        cut_unknown(text, i, next, out);
        i = next;
        continue;
      }
      // Letters and digits with decimals and a percent sign, or what lies between such.
      while (next < end && is_ascii_alnum(text.codes[next])) ++next;
      if (next > i) {
        if (next + 1 < end && text.codes[next] == '.' && is_ascii_digit(text.codes[next + 1])) {
          for (++next; next < end && is_ascii_digit(text.codes[next]);) ++next;
        }
        if (next < end && text.codes[next] == '%') ++next;
      } else {
        while (next < end && !is_han(text.codes[next]) && !is_ascii_alnum(text.codes[next])) ++next;
      }
      out.emplace_back(text.word(i, next));
      i = next;
    }
    return;
  }
  for (size_t i = begin; i < end; ++i) out.emplace_back(text.word(i, i + 1));
}

// Viterbi's path. Of equal sums the predecessor whose letter comes later in the alphabet counts (B, E, M, S).
void ChineseWords::cut_unknown(const Text& text, size_t begin, size_t end, std::vector<std::string>& out) const {
  static constexpr State kBefore[kStates][2] = {{kEnd, kSingle}, {kBegin, kMiddle}, {kBegin, kMiddle}, {kEnd, kSingle}};
  const size_t n = end - begin;
  const auto emit = [&](int state, size_t i) {
    const auto found = emit_[size_t(state)].find(text.codes[begin + i]);
    return found == emit_[size_t(state)].end() ? kNever : found->second;
  };
  std::array<double, kStates> sums{}, next{};
  std::vector<std::array<State, kStates>> from(n);
  for (int s = 0; s < kStates; ++s) sums[size_t(s)] = start_[size_t(s)] + emit(s, 0);
  for (size_t i = 1; i < n; ++i) {
    for (int s = 0; s < kStates; ++s) {
      const double own = emit(s, i);
      const auto reach = [&](State before) { return sums[before] + step_[before][size_t(s)] + own; };
      const double a = reach(kBefore[s][0]), b = reach(kBefore[s][1]);
      from[i][size_t(s)] = kBefore[s][b >= a ? 1 : 0];
      next[size_t(s)] = std::max(a, b);
    }
    sums = next;
  }
  std::vector<State> path(n);
  path[n - 1] = sums[kSingle] >= sums[kEnd] ? kSingle : kEnd;
  for (size_t i = n - 1; i > 0; --i) path[i - 1] = from[i][path[i]];
  size_t word = 0;
  for (size_t i = 0; i < n; ++i) {
    if (path[i] != kEnd && path[i] != kSingle) continue;
    out.emplace_back(text.word(begin + word, begin + i + 1));
    word = i + 1;
  }
}

}  // namespace longkv
