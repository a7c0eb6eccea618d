// Text from a file made safe for a message or a terminal.
#pragma once

#include <string>
#include <string_view>

namespace longkv {

// Control bytes and bytes that are not valid UTF-8 become \xNN; cut after about `max_bytes` with "..." at the end.
std::string printable(std::string_view text, size_t max_bytes = 80);

}  // namespace longkv
