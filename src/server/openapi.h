// The description of the interface (docs/openapi.yaml, part of the program) as JSON.
#pragma once

#include <string>

namespace longkv::server {

const std::string& openapi_json();

}  // namespace longkv::server
