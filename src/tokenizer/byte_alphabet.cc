// GPT-2's alphabet: every byte has a printable character. Printable Latin-1 bytes stand for themselves, the others for
// U+0100, U+0101 and so on in order.
#include <array>

#include "tokenizer/vocabulary.h"

namespace longkv {

namespace {

constexpr size_t kAlphabetEnd = 0x100 + 68;  // 256 - 188 bytes stand for others

constexpr bool stands_for_itself(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

constexpr std::array<int16_t, kAlphabetEnd> make_table() {
  std::array<int16_t, kAlphabetEnd> table{};
  for (auto& entry : table) entry = -1;
  size_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    table[stands_for_itself(byte) ? byte : next++] = static_cast<int16_t>(byte);
  }
  return table;
}

constexpr auto kByteOfChar = make_table();

}  // namespace

bool decode_byte_alphabet(std::string_view text, std::string& bytes) {
  bytes.clear();
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Char c = decode_utf8(text.data() + pos, text.size() - pos);
    if (!c.valid || c.code >= kAlphabetEnd || kByteOfChar[c.code] < 0) return false;
    bytes.push_back(static_cast<char>(kByteOfChar[c.code]));
    pos += c.length;
  }
  return true;
}

}  // namespace longkv
