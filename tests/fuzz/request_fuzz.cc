// Any bytes as a request's body or as an answer under a schema: an error or a request within its limits, never a crash.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "server/fields.h"
#include "server/json_grammar.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

// The first byte chooses what the rest is.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longkv::server;
  if (size < 1) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 == 0) {
    static const auto any = JsonSchema::any_object();
    JsonAcceptor acceptor(*any);
    std::string taken;
    for (const char c : text) {
      if (acceptor.push({&c, 1})) taken += c;
    }
    if (acceptor.closed()) require(nlohmann::json::accept(taken));
    return 0;
  }
  nlohmann::ordered_json body;
  if (parse_body(text, body)) return 0;
  require(body.is_object());
  Fields fields(body);
  const auto n = fields.integer("n", -5, 5);
  require(!n || (*n >= -5 && *n <= 5));
  const auto x = fields.number("x", 0, 1);
  require(!x || (*x >= 0 && *x <= 1));
  const auto s = fields.text("s", 8);
  require(!s || utf8_characters(*s) <= 8);
  (void)fields.boolean("b");
  (void)fields.finish();
  if (const nlohmann::ordered_json* schema = fields.any("schema")) {
    const nlohmann::json parts(*schema);
    const auto compiled = JsonSchema::compile(parts);
    if (compiled.ok()) {
      JsonAcceptor acceptor(**compiled);
      for (const char c : text) (void)acceptor.push({&c, 1});
    }
    const auto call = JsonSchema::call_of({{"f", std::make_shared<const nlohmann::json>(parts)}, {"g", nullptr}}, "a");
    if (call.ok()) {
      JsonAcceptor acceptor(**call);
      std::string taken;
      for (const char c : "{\"name\": \"f\", \"a\": " + text) {
        if (acceptor.push({&c, 1})) taken += c;
      }
      if (acceptor.closed()) require(nlohmann::json::parse(taken)["a"].is_object());
    }
  }
  return 0;
}
