// Files that this process was told to read: whether they can be, and that none is written over.
#pragma once

#include <string>

#include "longkv/status.h"

namespace longkv {

// Errors: kIo with the reason when `path` cannot be opened for reading or is a directory.
Status check_readable(const std::string& path);

// As check_readable(), and kIo for what is not a regular file: opening a pipe may wait for ever, and reading it twice
// gives nothing the second time.
Status check_regular(const std::string& path);

// Remembers the file behind `path`, by device and inode; a path without a file is ignored.
void note_input(const std::string& path);

// Error kInvalidArgument if `path` is a file that note_input() was told of.
Status check_not_input(const std::string& path);

}  // namespace longkv
