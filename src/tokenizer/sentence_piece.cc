#include "tokenizer/sentence_piece.h"

#include <algorithm>
#include <functional>

#include "tokenizer/byte_bpe.h"

namespace longkv {

SentencePiece::SentencePiece(const Vocabulary& vocabulary) : vocabulary_(&vocabulary) {
  std::vector<float> distinct(vocabulary.scores);
  std::sort(distinct.begin(), distinct.end(), std::greater<>());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  priority_count_ = distinct.size();
  priorities_.resize(vocabulary.scores.size());
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    const auto i = static_cast<size_t>(id);
    const auto rank = std::lower_bound(distinct.begin(), distinct.end(), vocabulary.scores[i], std::greater<>());
    priorities_[i] = static_cast<uint32_t>(rank - distinct.begin());

    const std::string_view piece = vocabulary.piece(id);
    if (vocabulary.is_control(id) || vocabulary.type(id) == TokenType::kByte) continue;
    longest_ = std::max(longest_, piece.size());
    uint32_t before = 0;
    for (size_t pos = 0; pos < piece.size();) {
      const Utf8Char c = decode_utf8(piece.data() + pos, piece.size() - pos);
      if (pos > 0) {
        if (before < 128 && c.code < 128) {
          ascii_pairs_.set(before * 128 + c.code);
        } else {
          pairs_.insert(before, c.code, {});
        }
      }
      before = c.code;
      pos += c.length;
    }
  }
}

Status SentencePiece::Encoder::encode(std::string_view text, WordCache& cache, std::vector<int32_t>& ids) {
  size_t begin = 0;
  uint32_t before = 0;
  for (size_t pos = 0; pos <= text.size();) {
    Utf8Char c;
    if (pos < text.size()) c = decode_utf8(text.data() + pos, text.size() - pos);
    if (pos > begin && (pos == text.size() || !model_.adjacent(before, c.code))) {
      const std::string_view word = text.substr(begin, pos - begin);
      if (!cache.append(word, ids)) {
        const size_t from = ids.size();
        LONGKV_TRY(encode_word(word, ids));
        cache.remember(word, ids, from);
      }
      begin = pos;
    }
    if (pos == text.size()) break;
    before = c.code;
    pos += c.length;
  }
  return {};
}

Status SentencePiece::Encoder::encode_word(std::string_view word, std::vector<int32_t>& ids) {
  symbols_.clear();
  lengths_.clear();
  for (size_t pos = 0; pos < word.size();) {
    const size_t length = decode_utf8(word.data() + pos, word.size() - pos).length;
    symbols_.push_back(vocabulary_.index.find(word.substr(pos, length)));
    lengths_.push_back(static_cast<int32_t>(length));
    pos += length;
  }
  merger_.run(word, symbols_, lengths_);
  return append_symbols(vocabulary_, word, symbols_, lengths_, ids);
}

}  // namespace longkv
