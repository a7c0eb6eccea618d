// The page's files and /openapi.yaml, part of the program (cmake/embed.cmake writes ui_files.cc).
#pragma once

#include <cstddef>
#include <vector>

namespace longkv::server {

struct UiFile {
  const char* path;  // of the address
  const char* type;
  const char* data;
  size_t size;
};

const std::vector<UiFile>& ui_files();

}  // namespace longkv::server
