// Ends a stream of text at the first of several stop strings, which may arrive in pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace longkv {

class StopMatcher {
 public:
  // Empty stop strings are ignored.
  explicit StopMatcher(std::vector<std::string> stops);

  // The text that may be shown after `text` arrived: everything before the first stop string. A tail that could be the
  // beginning of a stop string is held back. After a stop nothing more comes out.
  std::string push(std::string_view text);
  // What is held back, at the end of a stream that met no stop string.
  std::string flush();
  bool stopped() const { return stopped_; }
  // The stop string that ended the stream; empty before.
  const std::string& stop() const { return stop_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  std::string stop_;
  bool stopped_ = false;
};

}  // namespace longkv
