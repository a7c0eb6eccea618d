#include "line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace longkv::cli {

namespace {
constexpr size_t kLongestLine = size_t(64) << 20;  // a million tokens with every character escaped
}  // namespace

Result<bool> LineReader::next(std::string& line, const std::atomic<bool>* cancel) {
  for (size_t searched = 0;;) {
    const size_t end = buffer_.find('\n', searched);
    if (end != std::string::npos || (ended_ && !buffer_.empty())) {
      line = buffer_.substr(0, end);
      buffer_.erase(0, end == std::string::npos ? end : end + 1);
      if (!line.empty() && line.back() == '\r') line.pop_back();
      return true;
    }
    if (ended_) return false;
    searched = buffer_.size();
    if (searched > kLongestLine) {
      return fail(Code::kInvalidArgument, "the input has a line of more than {} bytes; text in lines is expected",
                  kLongestLine);
    }
    // Unlike a read, a poll is never taken up again after a signal.
    pollfd wait{fd_, POLLIN, 0};
    const int ready = ::poll(&wait, 1, -1);
    if (cancel->load()) return false;
    if (ready < 0 && errno == EINTR) continue;
    char bytes[4096];
    const ssize_t n = ::read(fd_, bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail(Code::kIo, "cannot read the input: {}", std::strerror(errno));
    ended_ = n == 0;
    buffer_.append(bytes, size_t(n));
  }
}

}  // namespace longkv::cli
