#include "base/log.h"

#include <atomic>

#include "base/print_line.h"

namespace longkv {

namespace {
std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::atomic<bool> g_strict{false};
std::atomic<int64_t> g_notices{0};
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
  print_line("note: " + text);
  return {};
}

void set_strict(bool strict) { g_strict.store(strict); }
int64_t notice_count() { return g_notices.load(); }

}  // namespace longkv
