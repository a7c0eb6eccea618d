// Values of the template interpreter, with Python's kinds and a mark on every byte of text that a user supplied.
//
// All objects of one rendering live in its Heap and die with it: values are small handles, templates may build cycles
// through namespaces and lists of any depth, and nothing is freed by recursion. Text of the caller is never copied.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace longkv::jinja {

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kBig,  // an integer of the caller between 2^63 and 2^64 - 1: printed and compared, no arithmetic
  kFloat,
  kStr,
  kList,
  kTuple,
  kView,       // of a dict: items(), keys(), values()
  kGenerator,  // what map, select and the like return: read once
  kDict,
  kNamespace,
  kMacro,
  kFunction,  // a global function
  kMethod,    // a method bound to its object
  kLoop,
  kCycler,
  kJoiner,
};

// Bytes [begin, end) of a text come from a user.
struct UserSpan {
  size_t begin = 0;
  size_t end = 0;
};

enum class Origin : uint8_t { kTemplate, kUser, kMixed };

// UTF-8 text. The bytes belong to the template, to the caller's messages or to the Heap.
struct Str {
  std::string_view text;
  Origin origin = Origin::kTemplate;
  std::vector<UserSpan> spans;        // for kMixed: in order, not touching
  mutable int64_t known_length = -1;  // characters, counted on first use

  bool ascii() const { return length() == int64_t(text.size()); }
  int64_t length() const;
};

struct Value;
struct Dict;
struct Macro;
struct Loop;
struct Bound;

struct List {
  std::vector<Value> items;
  size_t consumed = 0;  // of generators
};

struct Value {
  Kind kind = Kind::kUndefined;
  union {
    bool boolean;
    int64_t integer;
    uint64_t big;
    double real;
    const Str* str;
    List* list;  // kList, kTuple, kView, kGenerator, kCycler
    Dict* dict;  // kDict, kNamespace
    const Macro* macro;
    Loop* loop;
    const Bound* bound;         // kMethod
    const char* function;       // kFunction: its name
    const std::string* reason;  // kUndefined: what is undefined; may be null
    void* raw;
  };

  Value() : raw(nullptr) {}
  static Value none() { return with(Kind::kNone); }
  static Value of(bool b) {
    Value v = with(Kind::kBool);
    v.boolean = b;
    return v;
  }
  static Value of(int64_t i) {
    Value v = with(Kind::kInt);
    v.integer = i;
    return v;
  }
  static Value of(double d) {
    Value v = with(Kind::kFloat);
    v.real = d;
    return v;
  }
  static Value of(const Str* s) {
    Value v = with(Kind::kStr);
    v.str = s;
    return v;
  }
  static Value of(Kind kind, List* l) {
    Value v = with(kind);
    v.list = l;
    return v;
  }
  static Value of(Kind kind, Dict* d) {
    Value v = with(kind);
    v.dict = d;
    return v;
  }
  static Value of(Loop* l) {
    Value v = with(Kind::kLoop);
    v.loop = l;
    return v;
  }
  static Value of(const Macro* m) {
    Value v = with(Kind::kMacro);
    v.macro = m;
    return v;
  }
  static Value with(Kind kind) {
    Value v;
    v.kind = kind;
    return v;
  }

  bool is(Kind k) const { return kind == k; }
  bool undefined() const { return kind == Kind::kUndefined; }
  bool none_or_undefined() const { return kind == Kind::kNone || kind == Kind::kUndefined; }
  bool string() const { return kind == Kind::kStr; }
  bool integral() const { return kind == Kind::kInt || kind == Kind::kBool; }
  int64_t as_int() const { return kind == Kind::kBool ? int64_t(boolean) : integer; }
  bool numeric() const { return integral() || kind == Kind::kFloat; }
  double as_real() const { return kind == Kind::kFloat ? real : double(as_int()); }
  bool sequence() const { return kind == Kind::kList || kind == Kind::kTuple; }
  bool holds_items() const { return sequence() || kind == Kind::kView || kind == Kind::kGenerator; }
};

// Keeps the order of insertion. Keys are strings or other hashable values.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
  std::unordered_map<std::string_view, size_t> by_text;  // of string keys, once there are many

  Value* find(std::string_view key);
  Value* find(const Value& key);
  void set(const Value& key, const Value& value);
};

// A method name bound to the object before the dot. The name lives as long as the program.
struct Bound {
  Value object;
  std::string_view name;
};

// What `loop` stands for in a for block.
struct Loop {
  const std::vector<Value>* items = nullptr;
  size_t index = 0;
  bool has_last_changed = false;
  std::vector<Value> last_changed;
};

struct Scope {
  Scope* parent = nullptr;
  bool captured = false;  // a macro refers to it, so it must stay
  std::vector<std::pair<uint32_t, Value>> names;

  void set(uint32_t name, const Value& value);
};

struct Macro {
  uint32_t definition = 0;  // in the program
  Scope* scope = nullptr;   // where it was defined
};

// Owns everything that a rendering makes, and counts its bytes.
class Heap {
 public:
  // Text that outlives the rendering: of the template or of the caller.
  const Str* borrow(std::string_view text, Origin origin);
  const Str* own(std::string text, Origin origin);
  const Str* own(std::string text, Origin origin, std::vector<UserSpan> spans);
  // Bytes [begin, end) of `s`, without a copy.
  const Str* part(const Str* s, size_t begin, size_t end);
  List* list();
  Dict* dict();
  Scope* scope(Scope* parent);
  void release(Scope* scope);  // may be used for another scope, unless a macro captured it
  Loop* loop();
  Value undefined(std::string reason);
  Value method(const Value& object, std::string_view name);
  Value macro(uint32_t definition, Scope* scope);

  Value text(std::string_view borrowed) { return Value::of(borrow(borrowed, Origin::kTemplate)); }

  void charge(uint64_t bytes) { bytes_ += bytes; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::deque<Str> strings_;
  std::deque<std::string> texts_;
  std::deque<List> lists_;
  std::deque<Dict> dicts_;
  std::deque<Scope> scopes_;
  std::vector<Scope*> free_scopes_;
  std::deque<Loop> loops_;
  std::deque<Bound> bound_;
  std::deque<Macro> macros_;
  uint64_t bytes_ = 0;
};

// Joins pieces of text and remembers who wrote which.
class TextBuilder {
 public:
  void add(const Str* s) { add_part(s, 0, s->text.size()); }
  void add_part(const Str* s, size_t begin, size_t end);
  void add(std::string_view text, Origin origin);  // kTemplate or kUser
  // What the interpreter itself writes around somebody's text (quotes, digits): counts as the text before it.
  void add_neutral(std::string_view text);
  void reserve(size_t bytes) { text_.reserve(bytes); }

  size_t size() const { return text_.size(); }
  const std::string& text() const { return text_; }
  const std::vector<UserSpan>& spans() const { return spans_; }
  const Str* finish(Heap& heap);
  std::pair<std::string, std::vector<UserSpan>> take() { return {std::move(text_), std::move(spans_)}; }

 private:
  void mark(size_t begin, size_t end);

  std::string text_;
  std::vector<UserSpan> spans_;
};

// Python's name of a value's type, for messages.
const char* type_name(const Value& v);
bool truthy(const Value& v);
// Whether a string may become a key.
bool hashable(const Value& v);

}  // namespace longkv::jinja
