#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <deque>

#include "base/error.h"
#include "base/log.h"
#include "gguf/printable.h"
#include "tokenizer/byte_bpe.h"
#include "tokenizer/sentence_piece.h"
#include "tokenizer/special_matcher.h"
#include "tokenizer/vocabulary.h"

namespace longkv {

namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581, equal to a blank in SentencePiece

// A special token, or text between special tokens as views into the parts.
struct Fragment {
  int32_t id = kNoToken;
  std::vector<std::string_view> texts;
};

bool ascii_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

uint64_t hash_vocabulary(const Vocabulary& v, uint64_t merges_hash) {
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  const auto add = [&](const void* bytes, size_t n) { XXH3_64bits_update(&hash, bytes, n); };
  for (int32_t id = 0; id < v.size(); ++id) {
    const auto length = static_cast<uint32_t>(v.text(id).size());
    add(&length, sizeof length);
    add(v.text(id).data(), length);
  }
  add(v.types.data(), v.types.size());
  add(v.scores.data(), v.scores.size() * sizeof(float));
  add(v.pre_name.data(), v.pre_name.size());
  const int32_t settings[] = {int32_t(v.kind), v.special.bos, v.special.eos,      v.special.unknown,
                              v.add_bos,       v.add_eos,     v.add_space_prefix, !v.strip_right.empty()};
  add(settings, sizeof settings);
  add(&merges_hash, sizeof merges_hash);
  return XXH3_64bits_digest(&hash);
}

}  // namespace

struct Tokenizer::Impl {
  Vocabulary vocabulary;
  ByteBpe bpe;                                  // of kByteBpe
  std::unique_ptr<const SentencePiece> pieces;  // of kSentencePiece
  SpecialMatcher specials;
  StringIndex by_text;

  void cut(const TextPart& part, std::span<const int32_t> blocked, std::vector<Fragment>& fragments) const;
  Status encode_text(std::string_view text, WordCache& cache, std::vector<int32_t>& ids) const;
};

Result<Tokenizer> Tokenizer::from_metadata(const Metadata& metadata, std::string_view pre_override) {
  auto impl = std::make_shared<Impl>();
  Vocabulary& v = impl->vocabulary;
  LONGKV_TRY(load_vocabulary(metadata, pre_override, v));
  if (v.kind == VocabularyKind::kByteBpe) {
    LONGKV_TRY(impl->bpe.load(metadata, v));
  } else {
    impl->pieces = std::make_unique<SentencePiece>(v);
  }
  impl->specials = SpecialMatcher(v);
  impl->by_text = StringIndex(v.types.size());
  for (int32_t id = 0; id < v.size(); ++id) impl->by_text.insert(v.text(id), id);
  v.fingerprint = hash_vocabulary(v, impl->bpe.merges_hash());
  return Tokenizer(std::move(impl));
}

// Splits a part at its special tokens. Text joins the text fragment that the part before left open.
void Tokenizer::Impl::cut(const TextPart& part, std::span<const int32_t> blocked,
                          std::vector<Fragment>& fragments) const {
  const auto add_text = [&](std::string_view text) {
    if (!fragments.empty() && fragments.back().id != kNoToken && !vocabulary.strip_right.empty() &&
        vocabulary.strip_right[static_cast<size_t>(fragments.back().id)] != 0) {
      while (!text.empty() && ascii_space(text.front())) text.remove_prefix(1);
    }
    if (text.empty()) return;
    if (fragments.empty() || fragments.back().id != kNoToken) fragments.emplace_back();
    fragments.back().texts.push_back(text);
  };
  size_t pos = 0;
  while (pos < part.text.size()) {
    const auto match =
        specials.find(part.text, pos, part.parse_special, part.parse_special ? std::span<const int32_t>() : blocked);
    if (match.id == kNoToken) break;
    add_text(part.text.substr(pos, match.begin - pos));
    fragments.push_back({match.id, {}});
    pos = match.begin + match.length;
  }
  add_text(part.text.substr(pos));
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, bool add_special, bool parse_special) const {
  const TextPart part{text, parse_special};
  return encode_parts(std::span(&part, 1), add_special);
}

Result<std::vector<int32_t>> Tokenizer::encode_parts(std::span<const TextPart> parts, bool add_special,
                                                     std::span<const int32_t> blocked) const {
  const Vocabulary& v = impl_->vocabulary;
  size_t total = 0;
  for (const TextPart& part : parts) {
    total += part.text.size();
    if (part.text.size() > kMaxTextBytes || total > kMaxTextBytes) {
      return fail(Code::kInvalidArgument,
                  "the text is longer than {} bytes, the most that is tokenized at once; split it", kMaxTextBytes);
    }
  }
  std::vector<Fragment> fragments;
  for (const TextPart& part : parts) impl_->cut(part, blocked, fragments);

  std::vector<int32_t> ids;
  if (add_special && v.add_bos && (fragments.empty() || fragments.front().id != v.special.bos)) {
    ids.push_back(v.special.bos);
  }
  const bool sentence_piece = v.kind == VocabularyKind::kSentencePiece;
  WordCache cache;
  ByteBpe::Encoder bpe(v, impl_->bpe);
  std::optional<SentencePiece::Encoder> pieces;
  if (sentence_piece) pieces.emplace(v, *impl_->pieces);
  std::deque<std::string> buffers;  // the cache refers to them
  bool after_special = true;
  int64_t unknown = 0;  // tokens that stand for what has none
  for (const Fragment& fragment : fragments) {
    if (fragment.id != kNoToken) {
      ids.push_back(fragment.id);
      after_special = true;
      continue;
    }
    const bool prefix = sentence_piece && v.add_space_prefix && after_special;
    after_special = false;
    std::string_view text = fragment.texts.front();
    if (prefix || fragment.texts.size() > 1) {
      std::string& buffer = buffers.emplace_back(prefix ? " " : "");
      for (const std::string_view piece : fragment.texts) buffer += piece;
      text = buffer;
    }
    if (sentence_piece && text.find(kSpaceMark) != std::string_view::npos) {
      std::string& buffer = buffers.emplace_back();
      for (size_t pos = 0; pos < text.size();) {
        const size_t mark = std::min(text.find(kSpaceMark, pos), text.size());
        buffer.append(text, pos, mark - pos);
        if (mark < text.size()) buffer.push_back(' ');
        pos = mark + kSpaceMark.size();
      }
      text = buffer;
    }
    const auto from = ptrdiff_t(ids.size());
    LONGKV_TRY(sentence_piece ? pieces->encode(text, cache, ids) : bpe.encode(text, cache, ids));
    if (v.valid(v.special.unknown)) unknown += std::count(ids.begin() + from, ids.end(), v.special.unknown);
  }
  if (unknown > 0) {
    LONGKV_TRY(notice(fmt::format("{} places of the text have no token in this vocabulary and became '{}'", unknown,
                                  printable(v.piece(v.special.unknown)))));
  }
  if (add_special && v.add_eos) ids.push_back(v.special.eos);
  return ids;
}

std::string_view Tokenizer::piece(int32_t id) const {
  return impl_->vocabulary.valid(id) ? impl_->vocabulary.piece(id) : std::string_view();
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool show_special) const {
  const Vocabulary& v = impl_->vocabulary;
  std::string text;
  bool after_special = v.add_space_prefix;
  for (const int32_t id : ids) {
    if (!v.valid(id)) continue;
    if (v.is_control(id)) {
      if (show_special) text += v.piece(id);
      after_special = v.add_space_prefix;
      continue;
    }
    std::string_view piece = v.piece(id);
    if (after_special && piece.starts_with(' ') && v.type(id) != TokenType::kUserDefined) piece.remove_prefix(1);
    after_special = v.add_space_prefix && v.type(id) == TokenType::kUserDefined;
    text += piece;
  }
  return text;
}

int32_t Tokenizer::vocab_size() const { return impl_->vocabulary.size(); }

std::optional<int32_t> Tokenizer::bos() const {
  const int32_t id = impl_->vocabulary.special.bos;
  return id == kNoToken ? std::nullopt : std::optional(id);
}

std::optional<int32_t> Tokenizer::eos() const {
  const int32_t id = impl_->vocabulary.special.eos;
  return id == kNoToken ? std::nullopt : std::optional(id);
}

bool Tokenizer::adds_bos() const { return impl_->vocabulary.add_bos; }

bool Tokenizer::is_eog(int32_t id) const {
  return impl_->vocabulary.valid(id) && impl_->vocabulary.end_of_generation[static_cast<size_t>(id)] != 0;
}

bool Tokenizer::is_control(int32_t id) const { return impl_->vocabulary.valid(id) && impl_->vocabulary.is_control(id); }

bool Tokenizer::is_user_defined(int32_t id) const {
  return impl_->vocabulary.valid(id) && impl_->vocabulary.type(id) == TokenType::kUserDefined;
}

std::optional<int32_t> Tokenizer::find(std::string_view text) const {
  const int32_t id = impl_->by_text.find(text);
  return id < 0 ? std::nullopt : std::optional(id);
}

const std::string& Tokenizer::pre_tokenizer() const { return impl_->vocabulary.pre_name; }

uint64_t Tokenizer::fingerprint() const { return impl_->vocabulary.fingerprint; }

}  // namespace longkv
