#include "chat/jinja/value.h"

#include <algorithm>

#include "chat/jinja/operators.h"

namespace longkv::jinja {

namespace {

constexpr size_t kIndexFrom = 12;  // entries from which a dict looks keys up by hash
constexpr uint64_t kObjectBytes = 64;

}  // namespace

int64_t Str::length() const {
  if (known_length < 0) {
    int64_t n = 0;
    for (const char c : text) n += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    known_length = n;
  }
  return known_length;
}

Value* Dict::find(std::string_view key) {
  if (!by_text.empty()) {
    const auto at = by_text.find(key);
    return at == by_text.end() ? nullptr : &items[at->second].second;
  }
  for (auto& [k, v] : items) {
    if (k.string() && k.str->text == key) return &v;
  }
  return nullptr;
}

Value* Dict::find(const Value& key) {
  if (key.string()) return find(key.str->text);
  for (auto& [k, v] : items) {
    if (!k.string() && equal_keys(k, key)) return &v;
  }
  return nullptr;
}

void Dict::set(const Value& key, const Value& value) {
  if (Value* at = find(key)) {
    *at = value;
    return;
  }
  items.emplace_back(key, value);
  if (items.size() == kIndexFrom) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].first.string()) by_text.emplace(items[i].first.str->text, i);
    }
  } else if (items.size() > kIndexFrom && key.string()) {
    // A dict whose first keys are no strings keeps no index until there is one; then all of them are in it.
    if (by_text.empty()) {
      for (size_t i = 0; i < items.size(); ++i) {
        if (items[i].first.string()) by_text.emplace(items[i].first.str->text, i);
      }
    } else {
      by_text.emplace(key.str->text, items.size() - 1);
    }
  }
}

void Scope::set(uint32_t name, const Value& value) {
  for (auto& [n, v] : names) {
    if (n == name) {
      v = value;
      return;
    }
  }
  names.emplace_back(name, value);
}

const Str* Heap::borrow(std::string_view text, Origin origin) {
  bytes_ += kObjectBytes;
  Str& s = strings_.emplace_back();
  s.text = text;
  s.origin = origin;
  return &s;
}

const Str* Heap::own(std::string text, Origin origin) {
  bytes_ += text.size();
  return borrow(texts_.emplace_back(std::move(text)), origin);
}

const Str* Heap::own(std::string text, Origin origin, std::vector<UserSpan> spans) {
  bytes_ += text.size() + kObjectBytes + spans.size() * sizeof(UserSpan);
  Str& s = strings_.emplace_back();
  s.text = texts_.emplace_back(std::move(text));
  s.origin = origin;
  s.spans = std::move(spans);
  return &s;
}

const Str* Heap::part(const Str* s, size_t begin, size_t end) {
  if (begin == 0 && end == s->text.size()) return s;
  bytes_ += kObjectBytes;
  Str& out = strings_.emplace_back();
  out.text = s->text.substr(begin, end - begin);
  out.origin = s->origin;
  if (s->origin != Origin::kMixed) return &out;
  auto at = std::upper_bound(s->spans.begin(), s->spans.end(), begin,
                             [](size_t pos, const UserSpan& span) { return pos < span.end; });
  for (; at != s->spans.end() && at->begin < end; ++at) {
    const UserSpan cut{std::max(at->begin, begin) - begin, std::min(at->end, end) - begin};
    if (cut.begin < cut.end) out.spans.push_back(cut);
  }
  bytes_ += out.spans.size() * sizeof(UserSpan);
  if (out.spans.empty()) {
    out.origin = Origin::kTemplate;
  } else if (out.spans.size() == 1 && out.spans[0].begin == 0 && out.spans[0].end == out.text.size()) {
    out.origin = Origin::kUser;
    out.spans.clear();
  }
  return &out;
}

List* Heap::list() {
  bytes_ += kObjectBytes;
  return &lists_.emplace_back();
}

Dict* Heap::dict() {
  bytes_ += 2 * kObjectBytes;
  return &dicts_.emplace_back();
}

void Heap::release(Scope* scope) {
  if (scope->captured) return;
  scope->names.clear();
  free_scopes_.push_back(scope);
}

Scope* Heap::scope(Scope* parent) {
  if (!free_scopes_.empty()) {
    Scope* s = free_scopes_.back();
    free_scopes_.pop_back();
    s->parent = parent;
    return s;
  }
  bytes_ += kObjectBytes;
  Scope& s = scopes_.emplace_back();
  s.parent = parent;
  return &s;
}

Loop* Heap::loop() {
  bytes_ += 2 * kObjectBytes;
  return &loops_.emplace_back();
}

Value Heap::undefined(std::string reason) {
  bytes_ += kObjectBytes + reason.size();
  Value v;
  v.reason = &texts_.emplace_back(std::move(reason));
  return v;
}

Value Heap::method(const Value& object, std::string_view name) {
  bytes_ += kObjectBytes;
  Value v = Value::with(Kind::kMethod);
  v.bound = &bound_.emplace_back(Bound{object, name});
  return v;
}

Value Heap::macro(uint32_t definition, Scope* scope) {
  bytes_ += kObjectBytes;
  for (Scope* s = scope; s != nullptr && !s->captured; s = s->parent) s->captured = true;
  return Value::of(&macros_.emplace_back(Macro{definition, scope}));
}

void TextBuilder::mark(size_t begin, size_t end) {
  if (begin == end) return;
  if (!spans_.empty() && spans_.back().end == begin) {
    spans_.back().end = end;
  } else {
    spans_.push_back({begin, end});
  }
}

void TextBuilder::add_part(const Str* s, size_t begin, size_t end) {
  const size_t base = text_.size();
  text_.append(s->text, begin, end - begin);
  if (s->origin == Origin::kUser) mark(base, text_.size());
  if (s->origin != Origin::kMixed) return;
  for (const UserSpan& span : s->spans) {
    if (span.begin >= end) break;
    if (span.end <= begin) continue;
    mark(base + std::max(span.begin, begin) - begin, base + std::min(span.end, end) - begin);
  }
}

void TextBuilder::add(std::string_view text, Origin origin) {
  const size_t base = text_.size();
  text_.append(text);
  if (origin == Origin::kUser) mark(base, text_.size());
}

void TextBuilder::add_neutral(std::string_view text) {
  const bool after_user = !spans_.empty() && spans_.back().end == text_.size();
  add(text, after_user ? Origin::kUser : Origin::kTemplate);
}

const Str* TextBuilder::finish(Heap& heap) {
  if (spans_.empty()) return heap.own(std::move(text_), Origin::kTemplate);
  if (spans_.size() == 1 && spans_[0].begin == 0 && spans_[0].end == text_.size()) {
    return heap.own(std::move(text_), Origin::kUser);
  }
  return heap.own(std::move(text_), Origin::kMixed, std::move(spans_));
}

const char* type_name(const Value& v) {
  switch (v.kind) {
    case Kind::kUndefined: return "Undefined";
    case Kind::kNone: return "NoneType";
    case Kind::kBool: return "bool";
    case Kind::kInt:
    case Kind::kBig: return "int";
    case Kind::kFloat: return "float";
    case Kind::kStr: return "str";
    case Kind::kList: return "list";
    case Kind::kTuple: return "tuple";
    case Kind::kView: return "dict view";
    case Kind::kGenerator: return "generator";
    case Kind::kDict: return "dict";
    case Kind::kNamespace: return "Namespace";
    case Kind::kMacro: return "Macro";
    case Kind::kFunction:
    case Kind::kMethod: return "function";
    case Kind::kLoop: return "LoopContext";
    case Kind::kCycler: return "Cycler";
    case Kind::kJoiner: return "Joiner";
  }
  return "object";
}

bool truthy(const Value& v) {
  switch (v.kind) {
    case Kind::kUndefined:
    case Kind::kNone: return false;
    case Kind::kBool: return v.boolean;
    case Kind::kInt: return v.integer != 0;
    case Kind::kFloat: return v.real != 0;
    case Kind::kStr: return !v.str->text.empty();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView: return !v.list->items.empty();
    case Kind::kDict: return !v.dict->items.empty();
    case Kind::kLoop: return !v.loop->items->empty();
    default: return true;
  }
}

bool hashable(const Value& v) {
  return !(v.is(Kind::kList) || v.is(Kind::kDict) || v.is(Kind::kView) || v.is(Kind::kGenerator));
}

}  // namespace longkv::jinja
