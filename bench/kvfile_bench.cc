// Time to the first token from stored state: a KV file against the bandwidth of reading it, and a prefix cache against
// reading the prompt. One run each, printed as lines; not a loop, for the first time is what counts.
//   kvfile_bench MODEL restore TOKENS FILE [RECIPE]       random rows of so many tokens to FILE, restored, one decoded
//   kvfile_bench MODEL prefix DOCUMENT FOLDER [RECIPE]    two questions over a document, then a restart
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/seconds.h"
#include "engine/kv_file.h"
#include "engine/prefix_cache.h"
#include "tokenizer/tokenizer.h"

namespace {

using namespace longkv;
using Clock = std::chrono::steady_clock;

Result<std::unique_ptr<Session>> open_session(const std::shared_ptr<const LoadedModel>& model, const std::string& kv,
                                              int64_t context, ThreadPool& pool) {
  SessionOptions o;
  o.context = context;
  LONGKV_ASSIGN(o.recipe, parse_recipe(kv));
  return Session::create(model, o, pool);
}

// Bytes/s of reading a file that the page cache holds: by read() into one buffer, and by adding up its mapping.
std::pair<double, double> read_rates(const std::string& path, ThreadPool& pool) {
  std::vector<uint8_t> buffer(size_t(4) << 20);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  uint64_t total = 0;
  auto start = Clock::now();
  for (ssize_t n = 0; (n = ::read(fd, buffer.data(), buffer.size())) > 0;) total += uint64_t(n);
  const double by_read = double(total) / seconds_since(start);
  ::close(fd);
  const auto file = MappedFile::open(path);
  const std::span<const uint8_t> bytes = file->bytes();
  constexpr size_t kPiece = size_t(1) << 20;
  std::vector<uint64_t> sums((bytes.size() + kPiece - 1) / kPiece);
  start = Clock::now();
  pool.run(int64_t(sums.size()), [&](int64_t i, int) {
    const auto piece = bytes.subspan(size_t(i) * kPiece, std::min(kPiece, bytes.size() - size_t(i) * kPiece));
    sums[size_t(i)] = kv_checksum(piece.data(), piece.size());
  });
  return {by_read, double(bytes.size()) / seconds_since(start)};
}

Status bench_restore(const std::string& model_path, int64_t tokens, const std::string& path, const std::string& kv) {
  ThreadPool pool(default_threads());
  LONGKV_ASSIGN(const auto model, LoadedModel::load(model_path));
  {
    LONGKV_ASSIGN(const auto session, open_session(model, kv, tokens + 64, pool));
    LONGKV_ASSIGN(auto rows, session->make_kv(session->kv().recipe()));
    LONGKV_TRY(rows->fill_random(tokens, 1));
    session->adopt(std::move(rows), std::vector<int32_t>(size_t(tokens), 1),
                   std::vector<float>(size_t(model->config().vocab), 0.0f), {});
    const auto start = Clock::now();
    LONGKV_ASSIGN(const uint64_t bytes, save_session(*session, path));
    const double seconds = seconds_since(start);
    fmt::print("save      {:.2f} GB in {:.2f} s, flushed: {:.2f} GB/s\n", double(bytes) / 1e9, seconds,
               double(bytes) / 1e9 / seconds);
  }
  const auto [by_read, by_map] = read_rates(path, pool);
  fmt::print("page cache {:.2f} GB/s by read(), {:.2f} GB/s mapped and summed by {} threads\n", by_read / 1e9,
             by_map / 1e9, pool.threads());
  for (const bool verify : {true, false, true, false}) {
    LONGKV_ASSIGN(const auto session, open_session(model, kv, tokens + 64, pool));
    const auto start = Clock::now();
    KvRestoreOptions options;
    options.verify = verify;
    LONGKV_ASSIGN(const KvRestored restored, restore_session(*session, path, options));
    const double ready = seconds_since(start);
    LONGKV_TRY(session->decode(2));
    const double first = seconds_since(start);
    const auto second_start = Clock::now();
    LONGKV_TRY(session->decode(3));
    const double bytes = double(restored.bytes_mapped + restored.bytes_copied);
    fmt::print(
        "restore{} {:.3f} s, first token after {:.3f} s: {:.2f} GB/s; {:.2f} GB mapped, {:.3f} GB copied; next token "
        "{:.3f} s\n",
        verify ? "          " : " no-verify", ready, first, bytes / 1e9 / first, double(restored.bytes_mapped) / 1e9,
        double(restored.bytes_copied) / 1e9, seconds_since(second_start));
  }
  return {};
}

Status bench_prefix(const std::string& model_path, const std::string& document, const std::string& folder,
                    const std::string& kv) {
  ThreadPool pool(default_threads());
  LONGKV_ASSIGN(const auto model, LoadedModel::load(model_path));
  LONGKV_ASSIGN(const Tokenizer tokenizer, Tokenizer::from_metadata(model->file().metadata()));
  std::ostringstream text;
  text << std::ifstream(document).rdbuf();
  const auto prompt = [&](const char* question) {
    return tokenizer.encode(text.str() + question, /*add_special=*/true, /*parse_special=*/false);
  };
  LONGKV_ASSIGN(const auto first, prompt("\n\nWho is the story about, and where does it begin?"));
  LONGKV_ASSIGN(const auto second, prompt("\n\nWhat does the narrator want most?"));
  double reference = 0;
  // Time to the first token: lookup, what is left to read, and the token after.
  const auto ask = [&](PrefixCache& cache, const char* what, std::span<const int32_t> ids) -> Status {
    LONGKV_ASSIGN(const auto session, open_session(model, kv, int64_t(ids.size()) + 64, pool));
    const auto start = Clock::now();
    LONGKV_ASSIGN(const int64_t held, cache.lookup(*session, ids));
    const double looked = seconds_since(start);
    LONGKV_TRY(session->prefill(ids.subspan(size_t(held))));
    const double seconds = seconds_since(start);
    if (reference == 0) reference = seconds;
    const auto insert = Clock::now();
    LONGKV_TRY(cache.insert(*session));
    fmt::print(
        "{:<32} {:>6} tokens, {:>6} taken over in {:.4f} s, first token after {:.4f} s: {:.0f}x; stored in {:.3f} s\n",
        what, ids.size(), held, looked, seconds, reference / seconds, seconds_since(insert));
    return {};
  };
  const PrefixCacheOptions options{.ram_bytes = uint64_t(4) << 30, .folder = folder, .disk_bytes = uint64_t(8) << 30};
  {
    LONGKV_ASSIGN(const auto cache, PrefixCache::create(options));
    LONGKV_TRY(ask(*cache, "first question", first));
    LONGKV_TRY(ask(*cache, "second question", second));
    LONGKV_TRY(ask(*cache, "first question again", first));
    const auto start = Clock::now();
    LONGKV_TRY(cache->flush());
    fmt::print("flush to the folder {:.3f} s, {:.1f} MB\n", seconds_since(start),
               double(cache->stats().bytes_disk) / 1e6);
  }
  const auto start = Clock::now();
  LONGKV_ASSIGN(const auto cache, PrefixCache::create(options));
  fmt::print("scan of the folder {:.4f} s\n", seconds_since(start));
  LONGKV_ASSIGN(const auto third, prompt("\n\nWhere does it end?"));
  return ask(*cache, "third question, after a restart", third);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> a(argv, argv + argc);
  if (a.size() < 5 || (a[2] != "restore" && a[2] != "prefix")) {
    std::fprintf(stderr,
                 "usage: kvfile_bench MODEL restore TOKENS FILE [RECIPE]\n"
                 "       kvfile_bench MODEL prefix DOCUMENT FOLDER [RECIPE]\n");
    return 2;
  }
  const std::string kv = a.size() > 5 ? a[5] : "full";
  const Status done =
      a[2] == "restore" ? bench_restore(a[1], std::atoll(a[3].c_str()), a[4], kv) : bench_prefix(a[1], a[3], a[4], kv);
  if (!done.ok()) std::fprintf(stderr, "error: %s\n", done.message().c_str());
  return done.ok() ? 0 : 1;
}
