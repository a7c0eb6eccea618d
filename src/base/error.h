// Formatting helper for Status: fail(Code::kCorrupt, "tensor '{}' needs {} bytes", name, n).
#pragma once

#include <fmt/format.h>

#include <utility>

#include "longkv/status.h"

namespace longkv {

template <class... Args>
Status fail(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return Status(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace longkv
