#include "server/answer_text.h"

#include <utility>

namespace longkv::server {

TextPiece AnswerText::push(int32_t id, std::string_view bytes, std::optional<TokenReport> report) {
  const std::string text = decoder_.push(bytes);
  decoded_ += text.size();
  // The beginning of a character belongs to the token that began it, but comes out with the one that ends it.
  pending_.push_back({id, decoded_ + (decoder_.holds_partial() ? 1 : 0), std::move(report)});
  return release(stops_.push(text), false);
}

TextPiece AnswerText::flush() {
  if (stopped()) return {};
  std::string text = stops_.push(decoder_.flush());
  if (!stopped()) text += stops_.flush();
  return release(std::move(text), !stopped());
}

TextPiece AnswerText::release(std::string text, bool all) {
  TextPiece piece;
  shown_ += text.size();
  piece.text = std::move(text);
  while (!pending_.empty() && (all || pending_.front().end <= shown_)) {
    piece.ids.push_back(pending_.front().id);
    if (pending_.front().report) piece.reports.push_back(std::move(*pending_.front().report));
    pending_.pop_front();
  }
  return piece;
}

}  // namespace longkv::server
