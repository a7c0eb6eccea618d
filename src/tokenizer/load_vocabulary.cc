#include <cmath>
#include <cstdio>
#include <limits>

#include "base/error.h"
#include "tokenizer/vocabulary.h"

namespace longkv {

namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581

std::string key(std::string_view name) { return "tokenizer.ggml." + std::string(name); }

// An array that must describe every token; `present` is false when the key is absent.
template <class Read>
Status per_token(const Metadata& metadata, std::string_view name, size_t tokens, Read read) {
  const std::string full = key(name);
  const auto it = metadata.all().find(full);
  if (it == metadata.all().end()) return {};
  if (it->second.count != tokens) {
    return fail(Code::kCorrupt, "{} describes {} tokens, but {} has {}", full, it->second.count, key("tokens"), tokens);
  }
  return read(full);
}

// A special id from either spelling of its key; absent means `fallback`, and a fallback beyond the vocabulary means
// none.
Status read_id(const Metadata& metadata, std::initializer_list<std::string_view> names, int32_t fallback, int32_t size,
               int32_t& out) {
  out = fallback < size ? fallback : kNoToken;
  for (const std::string_view name : names) {
    const std::string full = key(name);
    if (!metadata.has(full)) continue;
    LONGKV_ASSIGN(const int64_t id,
                  metadata.integer(full, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()));
    // Converters write -1 (or its unsigned image) for "none".
    if (id == -1 || id == std::numeric_limits<uint32_t>::max()) {
      out = kNoToken;
    } else if (id < 0 || id >= size) {
      return fail(Code::kCorrupt, "{} is {}, but the vocabulary has {} tokens", full, id, size);
    } else {
      out = static_cast<int32_t>(id);
    }
    return {};
  }
  return {};
}

// Value of "<0xAB>", or -1.
int byte_value(std::string_view text) {
  if (text.size() != 6 || text.substr(0, 3) != "<0x" || text[5] != '>') return -1;
  int value = 0;
  for (const char c : text.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

std::string replace_space_marks(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const size_t mark = std::min(text.find(kSpaceMark, pos), text.size());
    out.append(text, pos, mark - pos);
    if (mark < text.size()) out.push_back(' ');
    pos = mark + kSpaceMark.size();
  }
  return out;
}

// Names by which models end an answer. The second list holds words that are ordinary text in some vocabularies, so
// only a control token counts.
constexpr std::string_view kEndNames[] = {"<|eot_id|>",      "<|im_end|>",
                                          "<|end|>",         "<|return|>",
                                          "<|call|>",        "<end_of_turn>",
                                          "<|endoftext|>",   "<|eom_id|>",
                                          "<|end_of_text|>", "<end_of_utterance>",
                                          "<EOT>",           "_<EOT>",
                                          "[EOT]",           "<\uFF5Cend\u2581of\u2581sentence\uFF5C>"};
constexpr std::string_view kEndNamesIfControl[] = {"</s>", "<eos>", "[EOS]"};

template <size_t N>
bool contains(const std::string_view (&names)[N], std::string_view name) {
  for (const std::string_view candidate : names) {
    if (candidate == name) return true;
  }
  return false;
}

// A token that ends an answer is a control token whatever type the converter gave it: text must never produce it.
void mark_ends(const Metadata& metadata, Vocabulary& v, int32_t eot, int32_t eom) {
  v.end_of_generation.assign(v.types.size(), 0);
  for (int32_t id = 0; id < v.size(); ++id) {
    const bool typed = metadata.has(key("token_type"));
    const bool special = v.type(id) == TokenType::kControl || v.type(id) == TokenType::kUserDefined || !typed;
    if ((special && contains(kEndNames, v.text(id))) ||
        (v.type(id) == TokenType::kControl && contains(kEndNamesIfControl, v.text(id)))) {
      v.end_of_generation[static_cast<size_t>(id)] = 1;
      v.types[static_cast<size_t>(id)] = TokenType::kControl;
    }
  }
  for (const int32_t id : {v.special.eos, eot, eom}) {
    if (id != kNoToken) v.end_of_generation[static_cast<size_t>(id)] = 1;
  }
}

void build_pieces(Vocabulary& v) {
  std::string bytes;
  v.byte_tokens.fill(kNoToken);
  for (int32_t id = 0; id < v.size(); ++id) {
    const std::string_view text = v.text(id);
    const TokenType type = v.type(id);
    const bool control = v.is_control(id);
    if (!control && v.kind == VocabularyKind::kSentencePiece) {
      const int byte = byte_value(text);
      if (byte >= 0 && (type == TokenType::kByte || type == TokenType::kNormal)) {
        if (v.byte_tokens[static_cast<size_t>(byte)] == kNoToken) v.byte_tokens[static_cast<size_t>(byte)] = id;
        v.types[static_cast<size_t>(id)] = TokenType::kByte;
        const char one = static_cast<char>(byte);
        v.pieces.add(std::string_view(&one, 1));
      } else {
        v.pieces.add(replace_space_marks(text));
      }
    } else if (!control && type != TokenType::kUserDefined && decode_byte_alphabet(text, bytes)) {
      v.pieces.add(bytes);
    } else {
      v.pieces.add(text);
    }
  }
}

// Whether text can become the token, and the bytes it then stands for if those differ from its piece. A byte-level
// vocabulary may hold texts outside of the alphabet; those only look like what their bytes spell.
bool spelled_bytes(const Vocabulary& v, int32_t id, std::string& bytes) {
  bytes.clear();
  if (v.is_control(id) || v.type(id) == TokenType::kByte || v.piece(id).empty()) return false;
  // SentencePiece text holds marks where it means spaces; a real space in a token can never match.
  if (v.kind == VocabularyKind::kSentencePiece) return v.text(id).find(' ') == std::string_view::npos;
  return decode_byte_alphabet(v.text(id), bytes);
}

void build_index(Vocabulary& v) {
  std::string bytes;
  std::vector<int32_t> respelled;  // user-defined tokens keep their text as their piece
  v.index = StringIndex(v.types.size());
  for (int32_t id = 0; id < v.size(); ++id) {
    if (!spelled_bytes(v, id, bytes)) continue;
    if (v.kind == VocabularyKind::kSentencePiece || bytes == v.piece(id)) {
      v.index.insert(v.piece(id), id);
    } else {
      respelled.push_back(id);
      v.respelled.add(bytes);
    }
  }
  for (size_t i = 0; i < respelled.size(); ++i) v.index.insert(v.respelled[i], respelled[i]);
  if (v.kind == VocabularyKind::kByteBpe) {
    for (int byte = 0; byte < 256; ++byte) {
      const char one = static_cast<char>(byte);
      v.byte_tokens[static_cast<size_t>(byte)] = v.index.find(std::string_view(&one, 1));
    }
  }
}

Status read_arrays(const Metadata& metadata, Vocabulary& v) {
  LONGKV_ASSIGN(const auto tokens, metadata.strings(key("tokens")));
  constexpr size_t kMaxTokens = size_t{1} << 24;
  if (tokens.empty() || tokens.size() > kMaxTokens) {
    return fail(Code::kCorrupt, "{} has {} entries; expected 1 to {}", key("tokens"), tokens.size(), kMaxTokens);
  }
  for (const std::string_view text : tokens) v.texts.add(text);

  v.types.assign(tokens.size(), TokenType::kNormal);
  LONGKV_TRY(per_token(metadata, "token_type", tokens.size(), [&](const std::string& name) -> Status {
    LONGKV_ASSIGN(const auto types, metadata.integers(name, -1, 0, 255));
    for (size_t i = 0; i < types.size(); ++i) {
      v.types[i] = types[i] <= int64_t(TokenType::kByte) ? TokenType(types[i]) : TokenType::kUndefined;
    }
    return {};
  }));
  if (v.kind != VocabularyKind::kSentencePiece) return {};

  if (!metadata.has(key("scores"))) {
    return fail(Code::kCorrupt, "a SentencePiece vocabulary needs {}, which is absent", key("scores"));
  }
  return per_token(metadata, "scores", tokens.size(), [&](const std::string& name) -> Status {
    LONGKV_ASSIGN(const auto scores, metadata.reals(name, -1));
    v.scores.assign(scores.begin(), scores.end());
    for (size_t i = 0; i < v.scores.size(); ++i) {
      if (std::isnan(v.scores[i])) return fail(Code::kCorrupt, "{}[{}] is not a number", name, i);
    }
    return {};
  });
}

Status read_specials(const Metadata& metadata, Vocabulary& v) {
  const int32_t n = v.size();
  const bool sp = v.kind == VocabularyKind::kSentencePiece;
  int32_t eot = kNoToken;
  int32_t eom = kNoToken;
  LONGKV_TRY(read_id(metadata, {"bos_token_id"}, sp ? 1 : kNoToken, n, v.special.bos));
  LONGKV_TRY(read_id(metadata, {"eos_token_id"}, sp ? 2 : kNoToken, n, v.special.eos));
  LONGKV_TRY(read_id(metadata, {"unknown_token_id", "unk_token_id"}, sp ? 0 : kNoToken, n, v.special.unknown));
  LONGKV_TRY(read_id(metadata, {"seperator_token_id", "separator_token_id"}, kNoToken, n, v.special.separator));
  LONGKV_TRY(read_id(metadata, {"padding_token_id"}, kNoToken, n, v.special.padding));
  LONGKV_TRY(read_id(metadata, {"eot_token_id"}, kNoToken, n, eot));
  LONGKV_TRY(read_id(metadata, {"eom_token_id"}, kNoToken, n, eom));
  mark_ends(metadata, v, eot, eom);

  LONGKV_ASSIGN(v.add_bos, metadata.boolean_or(key("add_bos_token"), sp || v.pre->add_bos));
  LONGKV_ASSIGN(v.add_eos, metadata.boolean_or(key("add_eos_token"), false));
  LONGKV_ASSIGN(v.add_space_prefix, metadata.boolean_or(key("add_space_prefix"), sp));
  if (v.add_bos && v.special.bos == kNoToken) {
    return fail(Code::kCorrupt, "the vocabulary asks for a BOS token but {} is absent", key("bos_token_id"));
  }
  if (v.add_eos && v.special.eos == kNoToken) {
    return fail(Code::kCorrupt, "the vocabulary asks for an EOS token but {} is absent", key("eos_token_id"));
  }
  // Phi-3's added tokens swallow the white space after them; the file format has no field for it.
  LONGKV_ASSIGN(const std::string architecture, metadata.string_or("general.architecture", ""));
  if (sp && architecture == "phi3") {
    v.strip_right.assign(v.types.size(), 0);
    for (int32_t id = 0; id < n; ++id) {
      const bool added = v.type(id) == TokenType::kControl || v.type(id) == TokenType::kUserDefined;
      const bool keeps = id == v.special.unknown || id == v.special.bos || v.text(id) == "<|endoftext|>";
      v.strip_right[static_cast<size_t>(id)] = added && !keeps;
    }
  }
  return {};
}

}  // namespace

Status load_vocabulary(const Metadata& metadata, std::string_view pre_override, Vocabulary& v) {
  LONGKV_ASSIGN(const std::string_view model, metadata.string(key("model")));
  if (model == "llama") {
    v.kind = VocabularyKind::kSentencePiece;
  } else if (model == "gpt2") {
    v.kind = VocabularyKind::kByteBpe;
  } else {
    return fail(Code::kUnsupported, "{} is '{}'; longkv reads 'llama' (SentencePiece BPE) and 'gpt2' (byte-level BPE)",
                key("model"), model);
  }
  LONGKV_ASSIGN(v.pre_name, metadata.string_or(key("pre"), ""));
  if (!pre_override.empty()) v.pre_name = pre_override;
  if (v.kind == VocabularyKind::kByteBpe) {
    v.pre = find_pre_tokenizer(v.pre_name);
    if (v.pre == nullptr) {
      return fail(
          Code::kUnsupported,
          "pre-tokenizer '{}' is not known; choose a known one with --override-pre if its rules are the same: {}",
          v.pre_name, known_pre_tokenizers());
    }
    v.pre_name = v.pre->name;
  }
  LONGKV_TRY(read_arrays(metadata, v));
  LONGKV_TRY(read_specials(metadata, v));
  build_pieces(v);
  build_index(v);
  return {};
}

}  // namespace longkv
