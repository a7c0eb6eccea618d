// The description of the interface (docs/openapi.yaml, part of the program) as JSON, with the limits of this server.
#pragma once

#include <string>

#include "server/service.h"

namespace longkv::server {

std::string openapi_json(const Service& service);

}  // namespace longkv::server
