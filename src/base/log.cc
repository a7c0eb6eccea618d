#include "base/log.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "base/print_line.h"

namespace longkv {

namespace {
std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::atomic<bool> g_strict{false};
std::atomic<int64_t> g_notices{0};

// How often each text of a notice came. Texts that name what a request brought are unlimited: of those beyond a number
// every one is printed.
struct NoticeCounts {
  static constexpr size_t kTexts = 1000;
  std::mutex mutex;
  std::unordered_map<std::string, int64_t> times;

  int64_t add(const std::string& text) {
    const std::lock_guard lock(mutex);
    const auto found = times.find(text);
    if (found != times.end()) return ++found->second;
    if (times.size() < kTexts) times.emplace(text, 1);
    return 1;
  }
};

NoticeCounts& notice_counts() {
  static NoticeCounts counts;
  return counts;
}

bool power_of_ten(int64_t n) {
  while (n % 10 == 0) n /= 10;
  return n == 1;
}

}  // namespace

void set_log_level(LogLevel level) { g_level.store(level); }
LogLevel log_level() { return g_level.load(std::memory_order_relaxed); }

void log_line(LogLevel level, const std::string& text) {
  if (log_level() < level) return;
  print_line(text);
}

Status notice(const std::string& text) {
  g_notices.fetch_add(1);
  if (g_strict.load()) return Status(Code::kInvalidArgument, text + " (an error because of --strict)");
  const int64_t times = notice_counts().add(text);
  if (power_of_ten(times)) print_line("note: " + text + (times == 1 ? "" : fmt::format(" ({} times)", times)));
  return {};
}

void set_strict(bool strict) { g_strict.store(strict); }
int64_t notice_count() { return g_notices.load(); }

}  // namespace longkv
