// Cutting and replacing: parts of a string stay views of it, so that long documents are not copied.
#include <algorithm>

#include "base/error.h"
#include "chat/jinja/methods.h"
#include "chat/jinja/text.h"
#include "tokenizer/unicode.h"

namespace longkv::jinja {

namespace {

bool is_line_end(uint32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

// First byte of the character that ends before `end`.
size_t char_before(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

uint32_t code_at(std::string_view text, size_t at) { return decode_utf8(text.data() + at, text.size() - at).code; }

std::vector<Value> split_space(Heap& heap, const Str* s, int64_t limit) {
  std::vector<Value> out;
  size_t at = skip_space(s->text, 0);
  while (at < s->text.size()) {
    size_t end = at;
    if (limit >= 0 && int64_t(out.size()) == limit) {
      end = s->text.size();
    } else {
      while (end < s->text.size() && !is_space(code_at(s->text, end))) {
        end += decode_utf8(s->text.data() + end, s->text.size() - end).length;
      }
    }
    out.push_back(Value::of(heap.part(s, at, end)));
    at = skip_space(s->text, end);
  }
  return out;
}

std::vector<Value> split_space_right(Heap& heap, const Str* s, int64_t limit) {
  std::vector<Value> out;
  size_t end = end_without_space(s->text);
  while (end > 0) {
    size_t begin = end;
    if (limit >= 0 && int64_t(out.size()) == limit) {
      begin = 0;
    } else {
      while (begin > 0 && !is_space(code_at(s->text, char_before(s->text, begin)))) begin = char_before(s->text, begin);
    }
    out.push_back(Value::of(heap.part(s, begin, end)));
    end = end_without_space(s->text.substr(0, begin));
  }
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace

Result<Value> split_text(Interpreter& in, const Str* s, const Arguments& arguments, bool from_right) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("split", arguments, {"sep", "maxsplit"}));
  LONGKV_ASSIGN(const int64_t limit, p.integer(1, -1));
  if (!p.has(0) || p[0].is(Kind::kNone)) {
    return in.list(from_right ? split_space_right(in.heap(), s, limit) : split_space(in.heap(), s, limit));
  }
  LONGKV_ASSIGN(const Str* by, p.text(0, nullptr));
  if (by->text.empty()) return value_error("empty separator");
  std::vector<Value> out;
  if (from_right) {
    size_t end = s->text.size();
    while (limit < 0 || int64_t(out.size()) < limit) {
      if (end < by->text.size()) break;
      const size_t found = s->text.rfind(by->text, end - by->text.size());
      if (found == std::string_view::npos) break;
      out.push_back(Value::of(in.heap().part(s, found + by->text.size(), end)));
      end = found;
    }
    out.push_back(Value::of(in.heap().part(s, 0, end)));
    std::reverse(out.begin(), out.end());
  } else {
    size_t at = 0;
    while (limit < 0 || int64_t(out.size()) < limit) {
      const size_t found = s->text.find(by->text, at);
      if (found == std::string_view::npos) break;
      out.push_back(Value::of(in.heap().part(s, at, found)));
      at = found + by->text.size();
    }
    out.push_back(Value::of(in.heap().part(s, at, s->text.size())));
  }
  LONGKV_TRY(in.tick_items(out.size()));
  return in.list(std::move(out));
}

Result<Value> split_lines(Interpreter& in, const Str* s, bool keep_ends) {
  std::vector<Value> out;
  size_t begin = 0;
  for (size_t i = 0; i < s->text.size();) {
    const Utf8Char c = decode_utf8(s->text.data() + i, s->text.size() - i);
    size_t next = i + c.length;
    if (!is_line_end(c.code)) {
      i = next;
      continue;
    }
    if (c.code == '\r' && next < s->text.size() && s->text[next] == '\n') ++next;
    out.push_back(Value::of(in.heap().part(s, begin, keep_ends ? next : i)));
    i = begin = next;
  }
  if (begin < s->text.size()) out.push_back(Value::of(in.heap().part(s, begin, s->text.size())));
  LONGKV_TRY(in.tick_items(out.size()));
  return in.list(std::move(out));
}

const Str* strip_text(Heap& heap, const Str* s, const Str* chars, bool left, bool right) {
  const auto strips = [&](uint32_t code) {
    if (chars == nullptr) return is_space(code);
    std::string one;
    append_utf8(one, code);
    return chars->text.find(one) != std::string_view::npos;
  };
  size_t begin = 0;
  size_t end = s->text.size();
  while (left && begin < end && strips(code_at(s->text, begin))) {
    begin += decode_utf8(s->text.data() + begin, end - begin).length;
  }
  while (right && end > begin && strips(code_at(s->text, char_before(s->text, end)))) end = char_before(s->text, end);
  return heap.part(s, begin, end);
}

Result<const Str*> replace_text(Interpreter& in, const Str* s, const Str* from, const Str* to, int64_t count) {
  TextBuilder out;
  size_t at = 0;
  int64_t done = 0;
  if (from->text.empty()) {
    // Between all characters, and at both ends.
    for (; at <= s->text.size() && (count < 0 || done < count); ++done) {
      out.add(to);
      if (at == s->text.size()) break;
      const size_t next = at + decode_utf8(s->text.data() + at, s->text.size() - at).length;
      out.add_part(s, at, next);
      at = next;
      LONGKV_TRY(in.tick_bytes(to->text.size()));
    }
    out.add_part(s, at, s->text.size());
    return out.finish(in.heap());
  }
  if (s->text.find(from->text) == std::string_view::npos) return s;
  for (; count < 0 || done < count; ++done) {
    const size_t found = s->text.find(from->text, at);
    if (found == std::string_view::npos) break;
    out.add_part(s, at, found);
    out.add(to);
    at = found + from->text.size();
    LONGKV_TRY(in.tick_bytes(to->text.size()));
  }
  out.add_part(s, at, s->text.size());
  return out.finish(in.heap());
}

}  // namespace longkv::jinja
