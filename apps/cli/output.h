// Standard output: the answer or the result rows, nothing else.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "longkv/status.h"

namespace longkv::cli {

// Standard streams that the caller closed become ones that refuse every byte; otherwise the next file opened would take
// their place and receive what is printed. Call before any file is opened.
void claim_standard_streams();

// Writes and flushes. Errors: kIo (a full device, a closed stream).
Status print(std::string_view text);

// The document and a line break. Bytes that are not UTF-8 (in paths, in names from files) are replaced.
std::string json_text(const nlohmann::ordered_json& document, int indent = 2);

}  // namespace longkv::cli
