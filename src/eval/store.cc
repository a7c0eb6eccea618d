#include "eval/store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/log.h"
#include "eval/text.h"

namespace longkv {

namespace {

namespace fs = std::filesystem;

std::string samples_path(const std::string& dir) { return dir + "/samples.jsonl"; }
std::string info_path(const std::string& dir) { return dir + "/run.json"; }

Status sync_folder(const std::string& dir) {
  const int fd = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return fail(Code::kIo, "cannot open '{}': {}", dir, std::strerror(errno));
  ::fsync(fd);
  ::close(fd);
  return {};
}

Result<EvalRunInfo> read_info(const std::string& dir) {
  LONGKV_ASSIGN(const std::string text, read_packed_file(info_path(dir), uint64_t(1) << 24));
  EvalRunInfo info = EvalRunInfo::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!info.is_object() || !info.contains("format")) {
    return fail(Code::kCorrupt, "'{}' is not a description of an evaluation", info_path(dir));
  }
  if (info["format"] != EvalStore::kFormat) {
    return fail(Code::kInvalidArgument, "'{}' is of format {}, this program writes {}; choose another folder",
                info_path(dir), info["format"].dump(), EvalStore::kFormat);
  }
  return info;
}

// The first field in which two runs differ. Fields below "note" may.
std::string difference(const EvalRunInfo& old, const EvalRunInfo& now) {
  for (const auto& [key, value] : now.items()) {
    if (key == "note") continue;
    const auto found = old.find(key);
    const std::string before = found == old.end() ? "nothing" : found->dump();
    if (before != value.dump()) return fmt::format("\"{}\" is {} there and {} now", key, before, value.dump());
  }
  return {};
}

}  // namespace

Status write_whole(const std::string& path, const std::string& text) {
  LONGKV_ASSIGN(AtomicFile file, AtomicFile::create(path));
  LONGKV_TRY(file.write({reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
  return file.commit();
}

EvalStore::EvalStore(EvalStore&& other) noexcept { *this = std::move(other); }

EvalStore& EvalStore::operator=(EvalStore&& other) noexcept {
  std::swap(dir_, other.dir_);
  std::swap(fd_, other.fd_);
  std::swap(info_, other.info_);
  std::swap(records_, other.records_);
  std::swap(keys_, other.keys_);
  return *this;
}

EvalStore::~EvalStore() {
  if (fd_ >= 0) ::close(fd_);
}

Status EvalStore::load(bool writes) {
  LONGKV_ASSIGN(const std::string text, read_packed_file(samples_path(dir_), uint64_t(1) << 34));
  size_t begin = 0;
  for (int64_t line = 1; begin < text.size(); ++line) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) {
      const std::string what =
          fmt::format("{} ends in the middle of line {}, as after a kill", samples_path(dir_), line);
      if (!writes) return notice(what + "; that line is left out");
      LONGKV_TRY(notice(what + "; the line is removed and its sample computed again"));
      if (::ftruncate(fd_, off_t(begin)) != 0) {
        return fail(Code::kIo, "cannot shorten '{}': {}", samples_path(dir_), std::strerror(errno));
      }
      return {};
    }
    const auto json = nlohmann::json::parse(text.begin() + int64_t(begin), text.begin() + int64_t(end), nullptr, false);
    auto record = EvalRecord::from_json(json);
    if (!record.ok()) {
      return fail(Code::kCorrupt, "'{}' line {} (byte {}) is not a result: {}", samples_path(dir_), line, begin,
                  json.is_discarded() ? "no JSON" : record.status().message());
    }
    if (keys_.insert(record->key()).second) {
      records_.push_back(std::move(record).value());
    } else {
      LONGKV_TRY(notice(fmt::format("{} line {} repeats a result and is left out", samples_path(dir_), line)));
    }
    begin = end + 1;
  }
  return {};
}

Result<EvalStore> EvalStore::open(const std::string& dir, const EvalRunInfo& info) {
  EvalStore store;
  store.dir_ = dir;
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) return fail(Code::kIo, "cannot create the folder '{}': {}", dir, error.message());
  const bool known = fs::exists(info_path(dir), error), filled = fs::exists(samples_path(dir), error);
  if (filled && !known) {
    return fail(Code::kInvalidArgument,
                "'{}' has samples.jsonl without run.json, so nobody knows what it holds; choose "
                "another folder",
                dir);
  }
  if (known) {
    LONGKV_ASSIGN(store.info_, read_info(dir));
    if (const std::string d = difference(store.info_, info); !d.empty()) {
      return fail(Code::kInvalidArgument,
                  "the results in '{}' are of another run and are left as they are: {}; choose "
                  "another folder",
                  dir, d);
    }
  } else {
    store.info_ = info;
    LONGKV_TRY(write_whole(info_path(dir), info.dump(2) + "\n"));
  }
  store.fd_ = ::open(samples_path(dir).c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (store.fd_ < 0) return fail(Code::kIo, "cannot write '{}': {}", samples_path(dir), std::strerror(errno));
  if (::flock(store.fd_, LOCK_EX | LOCK_NB) != 0) {
    return fail(Code::kInvalidArgument, "another process writes to '{}'", samples_path(dir));
  }
  LONGKV_TRY(sync_folder(dir));
  LONGKV_TRY(store.load(/*writes=*/true));
  return store;
}

Result<EvalStore> EvalStore::read(const std::string& dir) {
  EvalStore store;
  store.dir_ = dir;
  LONGKV_ASSIGN(store.info_, read_info(dir));
  LONGKV_TRY(store.load(/*writes=*/false));
  return store;
}

Status EvalStore::append(const EvalRecord& record) {
  const std::string line =
      record.to_json().dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  const off_t end = ::lseek(fd_, 0, SEEK_END);
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(fd_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = errno;
      (void)!::ftruncate(fd_, end);
      return fail(Code::kIo, "cannot write to '{}': {}; free some room and start again: it goes on from here",
                  samples_path(dir_), std::strerror(error));
    }
    done += size_t(n);
  }
  if (::fsync(fd_) != 0 && errno != EINVAL && errno != EROFS) {
    return fail(Code::kIo, "cannot flush '{}': {}", samples_path(dir_), std::strerror(errno));
  }
  keys_.insert(record.key());
  records_.push_back(record);
  return {};
}

}  // namespace longkv
