// Lines on standard error.
#pragma once

#include <string_view>

namespace longkv {

// Writes `text` and a line end to standard error in one piece. Control characters other than tabs and line ends, which
// files and requests can bring, are written as \xNN: a terminal would obey them.
void print_line(std::string_view text);

}  // namespace longkv
