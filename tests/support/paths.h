// Where tests find fixtures, goldens and real models.
#pragma once

#include <string>

namespace longkv::test {

// tests/golden/NAME
std::string golden(const std::string& name);
// models/NAME in the source tree.
std::string repo_model(const std::string& name);
// A model fetched by scripts/fetch_models; empty when it is absent (the test then skips and says so).
std::string fetched_model(const std::string& name);
// A fresh path in a directory that is removed when the process ends.
std::string temp_path(const std::string& name);

}  // namespace longkv::test
