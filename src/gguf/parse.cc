#include "gguf/parse.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "gguf/cursor.h"
#include "gguf/format.h"
#include "gguf/parse_values.h"
#include "gguf/printable.h"

namespace longkv {

namespace {

struct TensorRecord {
  TensorInfo info;
  uint64_t offset = 0;  // from the start of the data section
};

Status check_magic(std::span<const uint8_t> magic) {
  const std::string_view text(reinterpret_cast<const char*>(magic.data()), magic.size());
  if (text == "GGUF") return {};
  if (text == "FUGG")
    return fail(Code::kUnsupported, "a GGUF file in big-endian byte order; longkv reads little-endian ones");
  for (const std::string_view old : {"lmgg", "fmgg", "tjgg", "algg"}) {
    if (text == old) {
      return fail(Code::kUnsupported, "a model file of a format older than GGUF; convert the model again");
    }
  }
  return fail(Code::kCorrupt, "not a GGUF file: it starts with '{}' instead of 'GGUF'", printable(text));
}

Status check_version(uint32_t version) {
  if (version == 2 || version == 3) return {};
  const uint32_t swapped = __builtin_bswap32(version);
  if (swapped >= 1 && swapped <= 0xffff) {
    return fail(Code::kUnsupported,
                "a GGUF file in big-endian byte order (version field 0x{:08x}); longkv reads little-endian ones",
                version);
  }
  return fail(Code::kUnsupported, "GGUF version {}; longkv reads versions 2 and 3, convert the model again", version);
}

Status check_tensor_type(uint32_t type) {
  if (tensor_type_info(TensorType(type)) != nullptr) return {};
  const char* name = gguf_foreign_tensor_type(type);
  if (gguf_retired_tensor_type(type)) {
    return fail(Code::kUnsupported, "type {} ({}) was retired from the format; convert the model again", type, name);
  }
  return fail(Code::kUnsupported,
              "type {} ({}) is not supported; use a model of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, "
              "q5_1, q2_K to q6_K, iq4_nl or iq4_xs tensors",
              type, name != nullptr ? name : "unknown");
}

// Everything of a record behind its name.
Status read_record(Cursor& cursor, TensorRecord& record) {
  TensorInfo& info = record.info;
  LONGKV_ASSIGN(const uint32_t n_dims, cursor.number<uint32_t>("number of dimensions"));
  if (n_dims > uint32_t(kGgufMaxDims)) {
    return fail(Code::kCorrupt, "{} dimensions; at most {} are allowed", n_dims, kGgufMaxDims);
  }
  info.n_dims = int(n_dims);
  uint64_t elements = 1;
  for (size_t d = 0; d < n_dims; ++d) {
    LONGKV_ASSIGN(const uint64_t dim, cursor.number<uint64_t>("dimension"));
    const auto product = checked_mul(elements, dim);
    if (dim == 0 || !product || *product > uint64_t(std::numeric_limits<int64_t>::max())) {
      return fail(Code::kCorrupt, "dimension {} is {}; expected at least 1 and fewer than 2^63 elements in all", d,
                  dim);
    }
    elements = *product;
    info.dims[d] = int64_t(dim);
  }
  LONGKV_ASSIGN(const uint32_t type, cursor.number<uint32_t>("tensor type"));
  LONGKV_TRY(check_tensor_type(type));
  info.type = TensorType(type);
  LONGKV_ASSIGN(const int64_t row, row_bytes(info.type, info.dims[0]));
  const auto bytes = checked_mul(uint64_t(row), elements / uint64_t(info.dims[0]));
  if (!bytes) {
    return fail(Code::kCorrupt, "dimensions {} x {} x {} x {} need more than 2^64 bytes", info.dims[0], info.dims[1],
                info.dims[2], info.dims[3]);
  }
  info.bytes = *bytes;
  LONGKV_ASSIGN(record.offset, cursor.number<uint64_t>("tensor offset"));
  return {};
}

Result<std::vector<TensorRecord>> read_records(Cursor& cursor, uint64_t count) {
  std::vector<TensorRecord> records;
  records.reserve(count);  // bounded by the caller
  for (uint64_t i = 0; i < count; ++i) {
    LONGKV_ASSIGN(const auto name, cursor.string(kGgufMaxTensorName, "tensor name"));
    if (name.empty()) return fail(Code::kCorrupt, "tensor {} of {} has no name", i, count);
    TensorRecord record;
    record.info.name = std::string(name);
    const Status status = read_record(cursor, record);
    if (!status.ok()) return status.with_context(fmt::format("tensor '{}'", printable(name)));
    records.push_back(std::move(record));
  }
  return records;
}

Status check_unique_names(const std::vector<TensorRecord>& records) {
  std::vector<std::string_view> names;
  names.reserve(records.size());
  for (const TensorRecord& r : records) names.push_back(r.info.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return {};
  return fail(Code::kCorrupt, "tensor '{}' appears twice", printable(*twice));
}

// Places every tensor inside [data_start, file_size) without overlap.
Status check_extents(std::vector<TensorRecord>& records, uint64_t data_start, uint64_t alignment, uint64_t file_size) {
  uint64_t needed = 0;
  const TensorRecord* last = nullptr;
  for (const TensorRecord& r : records) {
    if (r.offset % alignment != 0) {
      return fail(Code::kCorrupt, "tensor '{}' has offset {}, not a multiple of the alignment {}",
                  printable(r.info.name), r.offset, alignment);
    }
    const auto begin = checked_add(data_start, r.offset);
    const auto end = begin ? checked_add(*begin, r.info.bytes) : std::nullopt;
    if (!end) {
      return fail(Code::kCorrupt, "tensor '{}' ends beyond 2^64: offset {}, {} bytes", printable(r.info.name), r.offset,
                  r.info.bytes);
    }
    if (*end > needed) {
      needed = *end;
      last = &r;
    }
  }
  if (needed > file_size) {
    return fail(Code::kCorrupt,
                "file truncated: needs {} bytes, has {} (tensor '{}' ends there); fetch the model again", needed,
                file_size, printable(last->info.name));
  }
  std::vector<const TensorRecord*> order;
  order.reserve(records.size());
  for (const TensorRecord& r : records) order.push_back(&r);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i - 1]->offset + order[i - 1]->info.bytes > order[i]->offset) {
      return fail(Code::kCorrupt, "tensors '{}' and '{}' overlap", printable(order[i - 1]->info.name),
                  printable(order[i]->info.name));
    }
  }
  return {};
}

Result<uint64_t> alignment_of(const Metadata& metadata) {
  LONGKV_ASSIGN(const int64_t value, metadata.integer_or("general.alignment", 0, std::numeric_limits<int64_t>::max(),
                                                         kGgufDefaultAlignment));
  const uint64_t alignment = uint64_t(value);
  if (!std::has_single_bit(alignment) || alignment < kGgufMinAlignment || alignment > kGgufMaxAlignment) {
    return fail(Code::kCorrupt, "general.alignment is {}; expected a power of two from {} to {}", alignment,
                kGgufMinAlignment, kGgufMaxAlignment);
  }
  return alignment;
}

}  // namespace

Result<GgufShard> parse_gguf(std::span<const uint8_t> bytes) {
  Cursor cursor(bytes);
  GgufShard shard;
  LONGKV_ASSIGN(const auto magic, cursor.take(4, "the GGUF magic"));
  LONGKV_TRY(check_magic(magic));
  LONGKV_ASSIGN(shard.version, cursor.number<uint32_t>("the GGUF version"));
  LONGKV_TRY(check_version(shard.version));
  LONGKV_ASSIGN(const uint64_t tensor_count, cursor.number<uint64_t>("the tensor count"));
  LONGKV_ASSIGN(const uint64_t pair_count, cursor.number<uint64_t>("the key-value count"));
  constexpr uint64_t kSmallestRecord = 8 + 1 + 4 + 4 + 8;  // name length, one character, dimensions, type, offset
  if (tensor_count > cursor.left() / kSmallestRecord) {
    return fail(Code::kCorrupt, "file truncated or corrupt: the header claims {} tensors, {} bytes are left",
                tensor_count, cursor.left());
  }
  LONGKV_ASSIGN(shard.metadata, parse_metadata(cursor, pair_count));
  LONGKV_ASSIGN(const uint64_t alignment, alignment_of(shard.metadata));
  LONGKV_ASSIGN(auto records, read_records(cursor, tensor_count));
  LONGKV_TRY(check_unique_names(records));
  const auto data_start = checked_align(cursor.position(), alignment);
  if (!data_start) return fail(Code::kCorrupt, "the tensor data would begin beyond 2^64");
  LONGKV_TRY(check_extents(records, *data_start, alignment, bytes.size()));
  shard.tensors.reserve(records.size());
  for (TensorRecord& r : records) {
    r.info.data = bytes.data() + *data_start + r.offset;
    shard.tensors.push_back(std::move(r.info));
  }
  return shard;
}

}  // namespace longkv
