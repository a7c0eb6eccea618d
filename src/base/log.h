// Messages to standard error, and the rule that nothing happens silently.
//
// Standard output belongs to answers and result rows. Everything else goes through here. A fallback, truncation,
// rounding or ignored setting is a notice(): printed, counted, and an error under --strict.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "longkv/status.h"

namespace longkv {

enum class LogLevel { kQuiet = 0, kInfo = 1, kVerbose = 2 };

void set_log_level(LogLevel level);
LogLevel log_level();

void log_line(LogLevel level, const std::string& text);

template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() >= LogLevel::kInfo) log_line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
void log_verbose(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() >= LogLevel::kVerbose) log_line(LogLevel::kVerbose, fmt::format(format, std::forward<Args>(args)...));
}

// Reports something done differently from what was asked. Printed even when quiet, the same text the 1st, 10th, 100th
// ... time with how often it came, since programs that answer many prompts meet it with each. Under strict mode it is
// an error.
Status notice(const std::string& text);
void set_strict(bool strict);
// Notices since the process started, printed or not.
int64_t notice_count();

}  // namespace longkv
