// How the parts of a KV session hand over their state: one function per part serves saving and restoring.
//
// A part visits its own fields in a fixed order, each under a name. Saving reads them, restoring fills them. What is
// restored comes from a file that may have been made to harm: a part bounds every size by what it expects and checks
// every number that it will use as an index; what does not fit is refused, and the half-filled part is thrown away.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/virtual_array.h"
#include "longkv/status.h"

namespace longkv {

// Unit in which arrays are mapped from files.
inline constexpr int64_t kStatePage = 4096;

struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

class KvState {
 public:
  explicit KvState(bool loading) : loading_(loading) {}
  virtual ~KvState() = default;
  KvState(const KvState&) = delete;
  KvState& operator=(const KvState&) = delete;

  bool loading() const { return loading_; }
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  // The first refusal counts; everything visited afterwards is left alone.
  void refuse(Code code, const std::string& why);
  // Refuses as damaged unless `good`; what: "the rows of ...".
  bool expect(bool good, const char* what);

  // Prefixes names with `level` and a number while the object lives: "l3.h1.rows".
  class Level {
   public:
    Level(KvState& state, std::string_view level, int64_t number = -1);
    ~Level() { state_.prefix_.resize(before_); }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    KvState& state_;
    size_t before_;
  };

  // Exactly these values: a span, vector or array.
  template <class Values>
  void values(std::string_view name, Values&& v) {
    const std::span all(v);
    static_assert(std::is_trivially_copyable_v<typename decltype(all)::element_type>);
    if (ok()) bytes(prefix_ + std::string(name), all.data(), all.size_bytes());
  }
  template <class T>
  void value(std::string_view name, T& v) {
    values(name, std::span<T>(&v, 1));
  }
  // As many values as there are; more than `most` are refused.
  template <class T>
  void list(std::string_view name, std::vector<T>& v, uint64_t most) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (!ok()) return;
    const std::string full = prefix_ + std::string(name);
    if (loading_) {
      const uint64_t n = size_of(full);
      if (!ok()) return;
      if (n % sizeof(T) != 0 || n / sizeof(T) > most) return refuse_size(full, n, most, sizeof(T));
      v.resize(size_t(n / sizeof(T)));
    }
    bytes(full, v.data(), v.size() * sizeof(T));
  }
  // The bytes of an array that count: ascending ranges, apart. The pages around them may be replaced as a whole; their
  // other bytes read as zero afterwards.
  void array(std::string_view name, VirtualArray& a, std::span<const ByteRange> live) {
    if (ok()) pages(prefix_ + std::string(name), a, live);
  }
  void array(std::string_view name, VirtualArray& a, uint64_t begin, uint64_t end) {
    const ByteRange range{begin, end};
    array(name, a, std::span(&range, 1));
  }

 protected:
  virtual void bytes(const std::string& name, void* data, uint64_t n) = 0;
  virtual uint64_t size_of(const std::string& name) = 0;
  virtual void pages(const std::string& name, VirtualArray& array, std::span<const ByteRange> live) = 0;

 private:
  void refuse_size(const std::string& name, uint64_t bytes, uint64_t most, uint64_t each);

  const bool loading_;
  Status status_;
  std::string prefix_;
};

}  // namespace longkv
