// What the fuzz target and the test of hostile files share: a KV file whose
// sums are made to match whatever it says, restored into a session that then
// goes on.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "kv/file/reader.h"
#include "kv/session.h"

namespace longkv::test {

inline constexpr int64_t kCapacity = 512;
inline constexpr int64_t kTokens = 400;

// Those of the corpus, made by tests/fuzz/make_kvfile_corpus.
inline constexpr const char* kFuzzRecipes[] = {
    "full",
    "q8",
    "quest:block=16,budget=64,dense_layers=0,summary=f16",
    "snapkv:budget=40,window=8",
    "h2o:budget=40",
    "kivi2:window=32",
    "magicpig:sink=4,local=16,dense=\"0\",hash_bits=4,tables=8",
    "retroinfer:sink=4,local=16,budget=64,cluster=8,segment=256",
    "sparq:budget=64,local=16,channels=8",
    "double_sparsity:budget=64,local=16,channels=8",
    "index=minmax(block=16) + select=topk(budget=64,sink=4,local=16,preselect=2,preselect_queries=16)",
    "think:window=32,queries=16",
};

template <class T>
T get_at(const std::vector<uint8_t>& bytes, uint64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}
template <class T>
void put_at(std::vector<uint8_t>& bytes, uint64_t at, const T& value) {
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

inline void mend(std::vector<uint8_t>& bytes) {
  const uint64_t size = bytes.size();
  if (size < sizeof(KvFileHeader) + sizeof(KvFileFooter)) return;
  const uint64_t footer_at = size - sizeof(KvFileFooter);
  auto footer = get_at<KvFileFooter>(bytes, footer_at);
  std::memcpy(footer.magic, kKvFooterMagic, sizeof(footer.magic));
  footer.file_bytes = size;
  if (footer.directory_offset <= footer_at && footer.directory_bytes <= footer_at - footer.directory_offset) {
    uint64_t at = footer.directory_offset;
    for (uint64_t i = 0; i < footer.entries && footer_at - at >= sizeof(KvEntry); ++i) {
      auto entry = get_at<KvEntry>(bytes, at);
      if (entry.encoding == 0 && entry.offset <= size && entry.stored <= size - entry.offset) {
        entry.checksum = kv_checksum(bytes.data() + entry.offset, entry.stored);
        put_at(bytes, at, entry);
      }
      const uint64_t name = (uint64_t(entry.name_bytes) + 7) / 8 * 8;
      at += sizeof(KvEntry);
      if (footer_at - at < name) break;
      at += name;
    }
    footer.directory_checksum = kv_checksum(bytes.data() + footer.directory_offset, footer.directory_bytes);
  }
  footer.checksum = kv_checksum(&footer, offsetof(KvFileFooter, checksum));
  put_at(bytes, footer_at, footer);
  auto header = get_at<KvFileHeader>(bytes, 0);
  header.checksum = kv_checksum(&header, offsetof(KvFileHeader, checksum));
  put_at(bytes, 0, header);
}

inline std::string line_of(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name)) return line.substr(name.size());
  }
  return {};
}

// A session as the corpus's model has it.
inline std::unique_ptr<KvSession> session_for(const std::string& settings, ThreadPool& pool) {
  KvShape shape;
  unsigned layers = 0, heads = 0, group = 0, dim_k = 0, dim_v = 0;
  const int found =
      std::sscanf(line_of(settings, "shape: ").c_str(), "layers=%u kv_heads=%u group=%u dim_k=%u dim_v=%u", &layers,
                  &heads, &group, &dim_k, &dim_v);
  if (found != 5 || layers > 4 || heads > 8 || group > 8 || dim_k > 128 || dim_v > 128) return nullptr;
  shape.layers = int(layers);
  shape.kv_heads = int(heads);
  shape.group_size = int(group);
  shape.dim_k = int(dim_k);
  shape.dim_v = int(dim_v);
  for (const char* text : kFuzzRecipes) {
    const auto recipe = parse_recipe(text);
    if (!recipe.ok()) std::abort();
    if (recipe->canonical() != line_of(settings, "kv: ")) continue;
    auto session = KvSession::create(shape, *recipe, RowCapacity{kCapacity}, AttendParams{0.2f, 0.0f}, pool);
    return session.ok() ? std::move(session).value() : nullptr;
  }
  return nullptr;
}

inline void go_on_from(KvSession& session) {
  const KvShape& shape = session.cache().shape();
  const size_t query_heads = size_t(shape.kv_heads) * size_t(shape.group_size);
  std::vector<float> q(query_heads * size_t(shape.dim_k), 0.5f), k(size_t(shape.kv_heads * shape.dim_k), 0.25f),
      v(size_t(shape.kv_heads * shape.dim_v), 1.0f), out(query_heads * size_t(shape.dim_v));
  for (int step = 0; step < 3; ++step) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      if (!session.decode(layer, q.data(), k.data(), v.data(), out.data()).ok()) return;
    }
  }
  (void)session.truncate(TokenCount{session.tokens().v - 1});
}

// 0: refused; 1: restored, and gone on from. Aborts where an error says
// nothing.
inline int try_kv_file(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data, data + size);
  mend(bytes);
  const int fd = ::memfd_create("kvfile_fuzz", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, bytes.data(), bytes.size()) != ssize_t(bytes.size())) std::abort();
  const auto file = KvFile::adopt(fd, "fuzz");
  if (!file.ok()) {
    if (file.status().message().empty()) std::abort();
    return 0;
  }
  static ThreadPool pool(1);
  (void)(*file)->verify(pool);
  const auto settings = (*file)->text("fingerprint", 1 << 16);
  if (!settings.ok()) return 0;
  const auto session = session_for(*settings, pool);
  if (!session) return 0;
  KvFileLoader loader(*file, /*verify=*/true);
  {
    const KvState::Level level(loader, "kv");
    session->visit(loader);
  }
  const Status restored = loader.finish(pool);
  if (!restored.ok()) {
    if (restored.message().empty()) std::abort();
    return 0;
  }
  if (session->tokens().v > 0 && session->tokens().v < kTokens) go_on_from(*session);
  return 1;
}

}  // namespace longkv::test
