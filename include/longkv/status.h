// Errors as values. Everything in longkv that can fail on a user's input returns Status or Result<T>;
// no exception crosses a module border and nothing aborts on input.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace longkv {

enum class Code {
  kOk = 0,
  kInvalidArgument,  // a flag, recipe or request is wrong: exit code 2
  kCorrupt,          // bytes of a file contradict themselves or its format
  kUnsupported,      // well-formed, but something longkv does not implement
  kOutOfMemory,      // the plan does not fit, or the system refused memory
  kIo,               // the operating system refused a file operation
  kCancelled,        // the user interrupted the run
  kInternal,         // a bug of longkv, reported instead of crashing
};

const char* code_name(Code code);

// A code and one message that says what was found, what was expected and what to do.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const& { return message_; }
  std::string message() && { return std::move(message_); }  // of a temporary: a reference to it would dangle

  // Prefixes the message with where the error was met ("model.gguf: ...").
  Status with_context(const std::string& where) const { return ok() ? *this : Status(code_, where + ": " + message_); }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::move(value)) {}        // NOLINT(google-explicit-constructor)
  Result(Status status) : v_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    if (std::get<Status>(v_).ok()) v_ = Status(Code::kInternal, "Result built from an ok Status");
  }

  bool ok() const { return std::holds_alternative<T>(v_); }
  explicit operator bool() const { return ok(); }

  Status status() const { return ok() ? Status() : std::get<Status>(v_); }
  T& value() & { return std::get<T>(v_); }
  const T& value() const& { return std::get<T>(v_); }
  T&& value() && { return std::get<T>(std::move(v_)); }
  T* operator->() { return &std::get<T>(v_); }
  const T* operator->() const { return &std::get<T>(v_); }
  T& operator*() & { return std::get<T>(v_); }
  const T& operator*() const& { return std::get<T>(v_); }
  T&& operator*() && { return std::get<T>(std::move(v_)); }

 private:
  std::variant<Status, T> v_;
};

}  // namespace longkv

#define LONGKV_CONCAT_INNER(a, b) a##b
#define LONGKV_CONCAT(a, b) LONGKV_CONCAT_INNER(a, b)

// Returns the Status of `expr` from the enclosing function unless it is ok.
#define LONGKV_TRY(expr)                                                                    \
  do {                                                                                      \
    if (::longkv::Status longkv_status = (expr); !longkv_status.ok()) return longkv_status; \
  } while (0)

// LONGKV_ASSIGN(auto x, make_x()): unwraps a Result or returns its Status from the enclosing function.
#define LONGKV_ASSIGN(lhs, expr) LONGKV_ASSIGN_INNER(LONGKV_CONCAT(result_, __LINE__), lhs, expr)
#define LONGKV_ASSIGN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                        \
  if (!tmp.ok()) return tmp.status();       \
  lhs = std::move(tmp).value()
