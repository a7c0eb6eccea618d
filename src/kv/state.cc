#include "kv/state.h"

#include "base/error.h"

namespace longkv {

void KvState::refuse(Code code, const std::string& why) {
  if (status_.ok()) status_ = Status(code, why);
}

bool KvState::expect(bool good, const char* what) {
  if (!good && ok()) {
    status_ = fail(Code::kCorrupt, "{}{} contradict the rest of the state; it was damaged or made by other software",
                   prefix_, what);
  }
  return good && ok();
}

KvState::Level::Level(KvState& state, std::string_view level, int64_t number)
    : state_(state), before_(state.prefix_.size()) {
  state.prefix_ += level;
  if (number >= 0) state.prefix_ += std::to_string(number);
  state.prefix_ += '.';
}

void KvState::refuse_size(const std::string& name, uint64_t bytes, uint64_t most, uint64_t each) {
  status_ = fail(Code::kCorrupt, "segment '{}' has {} bytes; at most {} values of {} bytes were expected", name, bytes,
                 most, each);
}

}  // namespace longkv
