#include "server/json_grammar.h"

#include <algorithm>

namespace longkv::server {

namespace {

// Without these bounds a model can write blanks or digits for ever.
constexpr int kMaxBlanks = 20;  // in a row: a line end and usual indentation
constexpr int kMaxDigits = 15;  // before the point, and after it: doubles hold as many
constexpr int kMaxExponentDigits = 2;

const std::string kWords[] = {"true", "false", "null"};

bool is_blank(unsigned char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
bool is_digit(unsigned char c) { return c >= '0' && c <= '9'; }
bool is_hex(unsigned char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// Keeps of `may` the texts whose byte `at` is c.
template <class Text>
uint64_t narrowed(uint64_t may, int32_t at, unsigned char c, const Text& text) {
  uint64_t left = 0;
  for (uint64_t bits = may; bits != 0; bits &= bits - 1) {
    const int i = __builtin_ctzll(bits);
    const std::string& t = text(i);
    if (size_t(at) < t.size() && static_cast<unsigned char>(t[size_t(at)]) == c) left |= uint64_t(1) << i;
  }
  return left;
}

uint64_t all_of(size_t n) { return n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; }

}  // namespace

JsonAcceptor::JsonAcceptor(const JsonSchema& schema) : schema_(&schema), depth_(1) { frames_[0].node = schema.root(); }

JsonAcceptor& JsonAcceptor::operator=(const JsonAcceptor& other) {
  if (this == &other) return *this;
  schema_ = other.schema_;
  depth_ = other.depth_;
  std::copy_n(other.frames_.begin(), depth_, frames_.begin());
  return *this;
}

bool JsonAcceptor::push(std::string_view bytes) {
  const JsonAcceptor before(*this);
  for (const char c : bytes) {
    if (step(static_cast<unsigned char>(c))) continue;
    *this = before;
    return false;
  }
  return true;
}

bool JsonAcceptor::complete() const {
  if (depth_ == 0) return true;
  // Only a number ends without a byte of its own.
  const State s = frames_[0].state;
  return depth_ == 1 &&
         (s == State::kZero || s == State::kDigits || s == State::kFraction || s == State::kExponentDigits);
}

const std::string& JsonAcceptor::literal(const Frame& f, int i) const {
  const auto& literals = schema_->node(f.node).literals;
  return literals.empty() ? kWords[i] : literals[size_t(i)];
}

bool JsonAcceptor::step(unsigned char c) {
  if (depth_ == 0) return false;
  for (bool again = true; again && depth_ > 0;) {
    again = false;
    Frame& f = frames_[size_t(depth_ - 1)];
    const bool between = f.state <= State::kAfterPair && f.state != State::kInKey;
    if (between && is_blank(c)) {
      // A call has its own blanks, around its arguments too.
      const bool in_call = schema_->node(f.node).call ||
                           (depth_ == 2 && f.state == State::kValue && schema_->node(frames_[0].node).call);
      return !in_call && ++f.blanks <= kMaxBlanks;
    }
    if (between) f.blanks = 0;
    bool ended = false;
    switch (f.state) {
      case State::kValue: return begin_value(f.node, c);
      case State::kFirstItem:
      case State::kAfterItem: return in_array(f, c);
      case State::kFirstKey:
      case State::kKey:
      case State::kAfterKey:
      case State::kAfterPair: return in_object(f, c);
      case State::kInKey: return in_key(f, c);
      case State::kInString: {
        const JsonSchema::Node& node = schema_->node(f.node);
        const bool full = node.max_length >= 0 && f.count >= node.max_length;
        if (full && c != '"' && f.escape == 0 && f.utf8 == 0) return false;  // no character may begin
        if (!in_string(f, c, ended)) return false;
        if (ended && f.count < node.min_length) return false;
        if (ended) --depth_;
        return true;
      }
      case State::kLiteral: return in_literal(f, c);
      case State::kCallHead: return in_call_head(f, c);
      case State::kCallEnd:
        if (c != '}') return false;
        --depth_;
        return true;
      default:
        if (!in_number(f, c, again)) return false;
        if (!again) return true;
        --depth_;  // the byte belongs to what holds the number
        if (depth_ == 0) return false;
    }
  }
  return false;
}

bool JsonAcceptor::begin_value(int node_id, unsigned char c) {
  Frame& f = frames_[size_t(depth_ - 1)];
  f = Frame{};
  f.node = node_id;
  const JsonSchema::Node& node = schema_->node(node_id);
  const auto allows = [&](uint8_t types) { return (node.types & types) != 0; };
  if (!node.literals.empty()) {
    f.state = State::kLiteral;
    f.may = all_of(node.literals.size());
    return in_literal(f, c);
  }
  if (node.call) {
    f.state = State::kCallHead;
    f.may = all_of(node.names.size());
    return in_call_head(f, c);
  }
  const bool room = depth_ < JsonSchema::kMaxDepth;
  switch (c) {
    case '{':
      f.state = State::kFirstKey;
      f.seen = node.forbidden;
      return room && allows(JsonSchema::kObject);
    case '[': f.state = State::kFirstItem; return room && allows(JsonSchema::kArray);
    case '"': f.state = State::kInString; return allows(JsonSchema::kString);
    case 't':
    case 'f':
    case 'n':
      f.state = State::kLiteral;
      f.may = c == 't' ? 1 : c == 'f' ? 2 : 4;
      return allows(c == 'n' ? JsonSchema::kNull : JsonSchema::kBoolean) && in_literal(f, c);
    default: break;
  }
  if (!allows(JsonSchema::kNumber | JsonSchema::kInteger)) return false;
  f.state = c == '-' ? State::kMinus : c == '0' ? State::kZero : State::kDigits;
  f.at = 1;
  return c == '-' || is_digit(c);
}

bool JsonAcceptor::in_literal(Frame& f, unsigned char c) {
  f.may = narrowed(f.may, f.at, c, [&](int i) -> const std::string& { return literal(f, i); });
  ++f.at;
  if (f.may == 0) return false;
  // No literal is the beginning of another one except among numbers, where the longer one then cannot be chosen.
  for (uint64_t bits = f.may; bits != 0; bits &= bits - 1) {
    if (literal(f, __builtin_ctzll(bits)).size() == size_t(f.at)) {
      --depth_;
      return true;
    }
  }
  return true;
}

// No beginning is one of another: the quote after the name ends it.
bool JsonAcceptor::in_call_head(Frame& f, unsigned char c) {
  const JsonSchema::Node& node = schema_->node(f.node);
  f.may = narrowed(f.may, f.at, c, [&](int i) -> const std::string& { return node.names[size_t(i)]; });
  ++f.at;
  if (f.may == 0) return false;
  const int first = __builtin_ctzll(f.may);
  if (node.names[size_t(first)].size() > size_t(f.at)) return true;
  f.state = State::kCallEnd;
  frames_[size_t(depth_++)] = Frame{};
  frames_[size_t(depth_ - 1)].node = node.children[size_t(first)];
  return true;
}

// escape: 0 none; 1 after a backslash; 2 before the first of four hexadecimal digits; 3 before the second after a 'd',
// where d8 to df would begin half of a pair; 4, 5, 6 before the second, third, fourth.
bool JsonAcceptor::in_string(Frame& f, unsigned char c, bool& ended) {
  if (f.escape == 1) {
    f.escape = c == 'u' ? 2 : 0;
    if (c != 'u') ++f.count;
    return c == 'u' || std::string_view("\"\\/bfnrt").find(char(c)) != std::string_view::npos;
  }
  if (f.escape >= 2) {
    if (!is_hex(c) || (f.escape == 3 && !(c >= '0' && c <= '7'))) return false;
    f.escape = f.escape == 2 ? ((c | 0x20) == 'd' ? 3 : 4) : f.escape == 3 ? 5 : f.escape == 6 ? 0 : f.escape + 1;
    if (f.escape == 0) ++f.count;
    return true;
  }
  if (f.utf8 > 0) {
    if (c < f.utf8_low || c > f.utf8_high) return false;
    f.utf8_low = 0x80, f.utf8_high = 0xbf;
    if (--f.utf8 == 0) ++f.count;
    return true;
  }
  if (c == '"') {
    ended = true;
    return true;
  }
  if (c == '\\') {
    f.escape = 1;
    return true;
  }
  if (c < 0x20) return false;
  if (c < 0x80) {
    ++f.count;
    return true;
  }
  // The second byte's limits keep out overlong forms, surrogates and what lies above U+10FFFF.
  if (c < 0xc2 || c > 0xf4) return false;
  f.utf8 = c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
  f.utf8_low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
  f.utf8_high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
  return true;
}

bool JsonAcceptor::in_number(Frame& f, unsigned char c, bool& again) {
  const bool digit = is_digit(c);
  const bool integer_only = (schema_->node(f.node).types & JsonSchema::kNumber) == 0;
  const auto go = [&](State next) {
    f.at = next == f.state ? f.at + 1 : 1;
    f.state = next;
    return true;
  };
  switch (f.state) {
    case State::kMinus: return digit && go(c == '0' ? State::kZero : State::kDigits);
    case State::kDigits:
      if (digit) return f.at < kMaxDigits && go(State::kDigits);
      [[fallthrough]];
    case State::kZero:
      if (digit) return false;
      if (c == '.') return !integer_only && go(State::kDot);
      if (c == 'e' || c == 'E') return !integer_only && go(State::kExponent);
      break;
    case State::kDot: return digit && go(State::kFraction);
    case State::kFraction:
      if (digit) return f.at < kMaxDigits && go(State::kFraction);
      if (c == 'e' || c == 'E') return go(State::kExponent);
      break;
    case State::kExponent:
      if (c == '+' || c == '-') return go(State::kExponentSign);
      [[fallthrough]];
    case State::kExponentSign: return digit && go(State::kExponentDigits);
    case State::kExponentDigits:
      if (digit) return f.at < kMaxExponentDigits && go(State::kExponentDigits);
      break;
    default: return false;
  }
  again = true;
  return true;
}

bool JsonAcceptor::in_array(Frame& f, unsigned char c) {
  const JsonSchema::Node& node = schema_->node(f.node);
  if (c == ']') {
    if (f.count < node.min_items) return false;
    --depth_;
    return true;
  }
  if (f.state == State::kAfterItem && c != ',') return false;
  if (node.max_items >= 0 && f.count >= node.max_items) return false;
  const bool after_comma = f.state == State::kAfterItem;
  ++f.count;
  f.state = State::kAfterItem;
  frames_[size_t(depth_++)] = Frame{};
  frames_[size_t(depth_ - 1)].node = node.items;
  return after_comma || begin_value(node.items, c);
}

bool JsonAcceptor::in_key(Frame& f, unsigned char c) {
  const JsonSchema::Node& node = schema_->node(f.node);
  bool ended = false;
  if (!in_string(f, c, ended)) return false;
  f.may = narrowed(f.may, f.at, c, [&](int i) -> const std::string& { return node.names[size_t(i)]; });
  ++f.at;
  // An escape could spell a property's name in another way.
  if (f.escape > 0 && !node.names.empty() && f.may == 0) return false;
  if (!ended) return f.may != 0 || node.additional >= 0;
  f.key = -1;
  for (uint64_t bits = f.may; bits != 0; bits &= bits - 1) {
    const int i = __builtin_ctzll(bits);
    if (node.names[size_t(i)].size() == size_t(f.at)) f.key = int8_t(i);
  }
  if (f.key < 0 && node.additional < 0) return false;
  if (f.key >= 0) {
    if ((f.seen >> f.key & 1) != 0) return false;
    f.seen |= uint64_t(1) << f.key;
  }
  f.state = State::kAfterKey;
  return true;
}

bool JsonAcceptor::in_object(Frame& f, unsigned char c) {
  const JsonSchema::Node& node = schema_->node(f.node);
  switch (f.state) {
    case State::kFirstKey:
    case State::kKey:
      if (c == '}' && f.state == State::kFirstKey) break;
      if (c != '"') return false;
      // With all names used and no others allowed no key can follow. Where others are, a name that came is watched
      // for, so that it does not come again as one of them.
      f.may = all_of(node.names.size()) & (node.additional < 0 ? ~f.seen : ~uint64_t(0));
      if (f.may == 0 && node.additional < 0) return false;
      f.state = State::kInKey;
      f.at = 1;
      return true;
    case State::kAfterKey: {
      if (c != ':') return false;
      const int child = f.key >= 0 ? node.children[size_t(f.key)] : node.additional;
      f.state = State::kAfterPair;
      frames_[size_t(depth_++)] = Frame{};
      frames_[size_t(depth_ - 1)].node = child;
      return true;
    }
    default:
      if (c == ',') {
        f.state = State::kKey;
        return node.additional >= 0 || (all_of(node.names.size()) & ~f.seen) != 0;
      }
  }
  if (c != '}' || (node.required & ~f.seen) != 0) return false;
  --depth_;
  return true;
}

}  // namespace longkv::server
