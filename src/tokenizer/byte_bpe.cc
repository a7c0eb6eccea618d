#include "tokenizer/byte_bpe.h"

#include <deque>

#include "base/error.h"

namespace longkv {

namespace {

constexpr std::string_view kMergesKey = "tokenizer.ggml.merges";
constexpr size_t kMaxMerges = size_t{1} << 25;

// Appends the tokens of single bytes, or the unknown token once.
Status append_bytes(const Vocabulary& vocabulary, std::string_view bytes, std::vector<int32_t>& ids) {
  const size_t before = ids.size();
  for (const char c : bytes) {
    const int32_t id = vocabulary.byte_tokens[static_cast<uint8_t>(c)];
    if (id == kNoToken) {
      ids.resize(before);
      if (vocabulary.special.unknown == kNoToken) {
        return fail(Code::kInvalidArgument,
                    "the text holds byte 0x{:02X}, for which the vocabulary has neither a token nor an unknown token",
                    static_cast<uint8_t>(c));
      }
      ids.push_back(vocabulary.special.unknown);
      return {};
    }
    ids.push_back(id);
  }
  return {};
}

}  // namespace

Status append_symbols(const Vocabulary& vocabulary, std::string_view word, std::span<const int32_t> symbols,
                      std::span<const int32_t> lengths, std::vector<int32_t>& ids) {
  size_t pos = 0;
  for (size_t i = 0; i < symbols.size(); ++i) {
    const auto length = static_cast<size_t>(lengths[i]);
    if (vocabulary.valid(symbols[i])) {
      ids.push_back(symbols[i]);
    } else {
      LONGKV_TRY(append_bytes(vocabulary, word.substr(pos, length), ids));
    }
    pos += length;
  }
  return {};
}

Status ByteBpe::load(const Metadata& metadata, const Vocabulary& vocabulary) {
  const auto it = metadata.all().find(kMergesKey);
  if (it == metadata.all().end()) {
    return fail(Code::kCorrupt, "a byte-level BPE vocabulary needs {}, which is absent", kMergesKey);
  }
  std::vector<std::string_view> merges;
  if (it->second.count > 0) {  // an empty array may carry any element type
    LONGKV_ASSIGN(merges, metadata.strings(kMergesKey));
  }
  if (merges.size() > kMaxMerges) {
    return fail(Code::kCorrupt, "{} has {} entries; at most {} are possible", kMergesKey, merges.size(), kMaxMerges);
  }
  merge_count_ = merges.size();
  pairs_ = PairMap(merges.size());

  // Strings that merges use but the vocabulary lacks get symbols above the vocabulary; they end as single bytes.
  StringIndex extra;
  std::deque<std::string> kept;
  int32_t next_extra = vocabulary.size();
  const auto symbol_of = [&](std::string_view bytes) {
    if (const int32_t id = vocabulary.index.find(bytes); id >= 0) return id;
    if (const int32_t id = extra.find(bytes); id >= 0) return id;
    extra.insert(kept.emplace_back(bytes), next_extra);
    return next_extra++;
  };
  for (int byte = 0; byte < 256; ++byte) {
    const char one = static_cast<char>(byte);
    byte_symbols_[static_cast<size_t>(byte)] = symbol_of(std::string_view(&one, 1));
  }

  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  std::string left;
  std::string right;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const std::string_view text = merges[rank];
    const size_t blank = text.find(' ', 1);
    if (blank == std::string_view::npos || blank + 1 == text.size()) {
      return fail(Code::kCorrupt, "{}[{}] is not two texts separated by a blank", kMergesKey, rank);
    }
    XXH3_64bits_update(&hash, text.data(), text.size());
    XXH3_64bits_update(&hash, "\n", 1);
    if (!decode_byte_alphabet(text.substr(0, blank), left)) left = text.substr(0, blank);
    if (!decode_byte_alphabet(text.substr(blank + 1), right)) right = text.substr(blank + 1);
    const int32_t left_symbol = symbol_of(left);
    const int32_t right_symbol = symbol_of(right);
    left += right;
    pairs_.insert(static_cast<uint32_t>(left_symbol), static_cast<uint32_t>(right_symbol),
                  {static_cast<uint32_t>(rank), symbol_of(left)});
  }
  merges_hash_ = XXH3_64bits_digest(&hash);
  return {};
}

Status ByteBpe::Encoder::encode(std::string_view text, WordCache& cache, std::vector<int32_t>& ids) {
  WordSplitter splitter(*vocabulary_.pre, text);
  for (std::string_view word = splitter.next(); !word.empty(); word = splitter.next()) {
    if (cache.append(word, ids)) continue;
    const size_t from = ids.size();
    LONGKV_TRY(encode_word(word, ids));
    cache.remember(word, ids, from);
  }
  return {};
}

Status ByteBpe::Encoder::encode_word(std::string_view word, std::vector<int32_t>& ids) {
  if (vocabulary_.pre->whole_words) {
    if (const int32_t id = vocabulary_.index.find(word); id >= 0) {
      ids.push_back(id);
      return {};
    }
  }
  symbols_.resize(word.size());
  lengths_.assign(word.size(), 1);
  for (size_t i = 0; i < word.size(); ++i) symbols_[i] = bpe_.byte_symbols_[static_cast<uint8_t>(word[i])];
  merger_.run(word, symbols_, lengths_);
  return append_symbols(vocabulary_, word, symbols_, lengths_, ids);
}

}  // namespace longkv
