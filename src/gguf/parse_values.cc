#include "gguf/parse_values.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/checked.h"
#include "gguf/format.h"
#include "gguf/printable.h"

namespace longkv {

namespace {

// What is still to be walked of an array of strings or arrays.
struct OpenArray {
  uint32_t element_type;
  uint64_t remaining;
};

struct ArrayHeader {
  uint32_t element_type;
  uint64_t count;
};

Status check_bools(std::span<const uint8_t> bytes) {
  const auto bad = std::find_if(bytes.begin(), bytes.end(), [](uint8_t b) { return b > 1; });
  if (bad == bytes.end()) return {};
  return fail(Code::kCorrupt, "a bool has the value {}; only 0 and 1 are allowed", int(*bad));
}

Result<ArrayHeader> read_array_header(Cursor& cursor) {
  ArrayHeader header;
  LONGKV_ASSIGN(header.element_type, cursor.number<uint32_t>("array element type"));
  LONGKV_ASSIGN(header.count, cursor.number<uint64_t>("array length"));
  if (header.element_type >= kGgufTypeCount) {
    return fail(Code::kCorrupt, "unknown array element type {}", header.element_type);
  }
  if (header.count > kGgufMaxArray) {
    return fail(Code::kCorrupt, "an array claims {} elements; at most {} are allowed", header.count, kGgufMaxArray);
  }
  // The smallest string is its 8-byte length, the smallest array a type and a length.
  const uint64_t smallest = header.element_type == uint32_t(GgufType::kString) ? 8
                            : header.element_type == uint32_t(GgufType::kArray)
                                ? 12
                                : gguf_scalar_bytes(header.element_type);
  const auto needed = checked_mul(header.count, smallest);
  if (!needed || *needed > cursor.left()) {
    return fail(Code::kCorrupt,
                "file truncated or corrupt: an array of {} {} elements needs at least {} bytes, {} are left",
                header.count, gguf_type_name(header.element_type), needed.value_or(UINT64_MAX), cursor.left());
  }
  return header;
}

// Moves the cursor behind an array's elements. Work is linear in the bytes passed; depth is a vector, not a call stack.
Status skip_elements(Cursor& cursor, const ArrayHeader& header) {
  std::vector<OpenArray> open{{header.element_type, header.count}};
  while (!open.empty()) {
    OpenArray& top = open.back();
    if (top.remaining == 0) {
      open.pop_back();
    } else if (top.element_type == uint32_t(GgufType::kString)) {
      for (; top.remaining > 0; --top.remaining) LONGKV_TRY(cursor.string(kGgufMaxString, "array string").status());
    } else if (top.element_type == uint32_t(GgufType::kArray)) {
      --top.remaining;
      if (int(open.size()) >= kGgufMaxNesting) {
        return fail(Code::kCorrupt, "arrays are nested deeper than {} levels", kGgufMaxNesting);
      }
      LONGKV_ASSIGN(const ArrayHeader inner, read_array_header(cursor));
      open.push_back({inner.element_type, inner.count});
    } else {
      // Cannot overflow: read_array_header compared the product with the bytes left.
      LONGKV_ASSIGN(const auto raw, cursor.take(top.remaining * gguf_scalar_bytes(top.element_type), "array elements"));
      if (top.element_type == uint32_t(GgufType::kBool)) LONGKV_TRY(check_bools(raw));
      top.remaining = 0;
    }
  }
  return {};
}

Result<GgufValue> read_value(Cursor& cursor) {
  GgufValue value;
  value.count = 1;
  LONGKV_ASSIGN(value.type, cursor.number<uint32_t>("value type"));
  if (value.type >= kGgufTypeCount) return fail(Code::kCorrupt, "unknown value type {}", value.type);
  if (value.type == uint32_t(GgufType::kString)) {
    LONGKV_ASSIGN(const auto text, cursor.string(kGgufMaxString, "string"));
    value.bytes = {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
    return value;
  }
  if (value.type == uint32_t(GgufType::kArray)) {
    LONGKV_ASSIGN(const ArrayHeader header, read_array_header(cursor));
    value.element_type = header.element_type;
    value.count = header.count;
    Cursor start = cursor;
    LONGKV_TRY(skip_elements(cursor, header));
    LONGKV_ASSIGN(value.bytes, start.take(cursor.position() - start.position(), "array"));
    return value;
  }
  LONGKV_ASSIGN(value.bytes, cursor.take(gguf_scalar_bytes(value.type), "value"));
  if (value.type == uint32_t(GgufType::kBool)) LONGKV_TRY(check_bools(value.bytes));
  return value;
}

}  // namespace

Result<Metadata> parse_metadata(Cursor& cursor, uint64_t count) {
  constexpr uint64_t kSmallestPair = 8 + 1 + 4 + 1;  // key length, one character, type, one byte
  if (count > cursor.left() / kSmallestPair) {
    return fail(Code::kCorrupt, "file truncated or corrupt: the header claims {} key-value pairs, {} bytes are left",
                count, cursor.left());
  }
  Metadata metadata;
  for (uint64_t i = 0; i < count; ++i) {
    LONGKV_ASSIGN(const auto key, cursor.string(kGgufMaxKey, "key"));
    if (key.empty()) return fail(Code::kCorrupt, "key {} of {} is empty", i, count);
    const auto value = read_value(cursor);
    if (!value.ok()) return value.status().with_context(fmt::format("key '{}'", printable(key)));
    LONGKV_TRY(metadata.insert(std::string(key), *value));
  }
  return metadata;
}

}  // namespace longkv
