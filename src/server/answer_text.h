// From tokens to what a client may see: whole characters, nothing of a stop string, log probabilities with their text.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/events.h"
#include "tokenizer/stop_matcher.h"
#include "tokenizer/stream_decoder.h"

namespace longkv::server {

class AnswerText {
 public:
  explicit AnswerText(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // What a token lets out. `bytes` is empty for a token without text.
  TextPiece push(int32_t id, std::string_view bytes, std::optional<TokenReport> report);
  // What is held back at the end of an answer.
  TextPiece flush();

  bool stopped() const { return stops_.stopped(); }
  const std::string& stop() const { return stops_.stop(); }

 private:
  TextPiece release(std::string text, bool all);

  struct Pending {
    int32_t id;
    size_t end;  // of its text, in all that the decoder gave out
    std::optional<TokenReport> report;
  };
  StreamDecoder decoder_;
  StopMatcher stops_;
  std::deque<Pending> pending_;
  size_t decoded_ = 0, shown_ = 0;  // bytes
};

}  // namespace longkv::server
