// Lines of an input that Ctrl-C can end.
#pragma once

#include <atomic>
#include <string>

#include "longkv/status.h"

namespace longkv::cli {

class LineReader {
 public:
  explicit LineReader(int fd) : fd_(fd) {}

  // The next line without its end; false at the end of input and when `cancel` was set while waiting. A last line
  // without a line break counts. Errors: kIo; kInvalidArgument for a line that does not end.
  Result<bool> next(std::string& line, const std::atomic<bool>* cancel);

 private:
  int fd_;
  bool ended_ = false;
  std::string buffer_;  // read, not yet returned
};

}  // namespace longkv::cli
