// POST /slots/N?action=save|restore|erase.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>

#include "base/error.h"
#include "engine/kv_file.h"
#include "server/api_response.h"
#include "server/fields.h"
#include "server/http_routes.h"

namespace longkv::server {

namespace {

using Json = nlohmann::ordered_json;

// A plain file inside of the folder, whatever a client writes: letters, digits, '.', '-' and '_', no dot in front.
Result<std::string> file_in(const std::string& folder, const std::string& name) {
  const bool plain = !name.empty() && name.size() <= 128 && name.front() != '.' &&
                     std::all_of(name.begin(), name.end(), [](unsigned char c) {
                       return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
                              c == '-' || c == '_';
                     });
  if (!plain) {
    return fail(Code::kInvalidArgument,
                "'filename' must be a name of letters, digits, '.', '-' and '_' that does not begin with a dot");
  }
  const std::filesystem::path path = std::filesystem::path(folder) / name;
  std::error_code ignored;
  if (std::filesystem::is_symlink(path, ignored))
    return fail(Code::kInvalidArgument, "'{}' is a link; slots are saved to plain files", name);
  return path.string();
}

double ms_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

void HttpRoutes::slot_action(const Request& request, Response& response) {
  // Of HTTP for an error that is nobody's wrong request: the slot is busy or another client's, the file does not suit.
  int refusal = 0;
  const auto done = [&](const Status& s, const Json& json) {
    if (s.ok()) return response.set_content(to_text(json), "application/json");
    ApiError error = api_error(s);
    if (refusal != 0) error.status = refusal;
    if (refusal == 403) error.type = "permission_error";
    answer_error(response, error);
  };
  const auto with_slot = [&](int slot, const Scheduler::SlotAction& work) {
    bool busy = false;
    Status s = service.scheduler().with_idle_slot(slot, work, &busy);
    if (busy) refusal = 409;
    return s;
  };
  if (request.get_param_value_count("action") > 1)
    return answer_error(response, {400, "invalid_request_error", "'action' is given more than once", "action"});
  const std::string action = request.get_param_value("action");
  const int id = std::stoi(request.matches[1].str());
  const std::string salt = client_salt(request);
  if (action == "erase") {
    int64_t erased = 0;
    const Status s = with_slot(id, [&](Slot& slot, const Pause&) {
      erased = int64_t(slot.held().size());
      slot.erase();
      return Status();
    });
    return done(s, {{"id_slot", id}, {"n_erased", erased}});
  }
  if (action != "save" && action != "restore")
    return answer_error(response, {400, "invalid_request_error", "'action' must be save, restore or erase", "action"});
  if (options.slot_folder.empty()) {
    return answer_error(response,
                        {501, "not_supported_error", "this server saves no slots; start it with --slot-save-path"});
  }
  nlohmann::ordered_json body = nlohmann::ordered_json::object();
  if (const auto error = request.body.empty() ? std::nullopt : parse_body(request.body, body))
    return answer_error(response, *error);
  Fields fields(body);
  const std::string name = fields.text("filename", 128).value_or(fmt::format("slot-{}.kv", id));
  const auto kv = fields.text("kv", 4096);
  std::shared_ptr<const Recipe> recipe = service.options().recipes.front().recipe;
  if (kv) {
    const auto found = service.find_recipe(*kv);
    found.ok() ? void(recipe = *found) : fields.fail("kv", found.status());
  }
  if (const auto& error = fields.finish()) return answer_error(response, *error);
  const auto path = file_in(options.slot_folder, name);
  if (!path.ok()) return done(path.status(), {});
  std::error_code ignored;
  const auto kind = std::filesystem::status(*path, ignored).type();
  if (action == "restore" && kind == std::filesystem::file_type::not_found)
    return answer_error(response, {404, "not_found_error", "there is no saved slot '" + name + "'", "filename"});
  if (kind != std::filesystem::file_type::not_found && kind != std::filesystem::file_type::regular)
    return answer_error(response, {409, "invalid_request_error", "'" + name + "' is not a regular file", "filename"});
  const auto begin = std::chrono::steady_clock::now();
  Json json = {{"id_slot", id}, {"filename", name}};
  const Status s = with_slot(id, [&](Slot& slot, const Pause& pause) -> Status {
    if (action == "save") {
      // Nobody reads by way of a file what the slot would not have shared.
      if (slot.salt() != salt && !slot.held().empty()) {
        refusal = 403;
        return fail(Code::kInvalidArgument, "slot {} holds rows of another client", id);
      }
      LONGKV_ASSIGN(const uint64_t bytes, save_session(slot.session(), *path, /*compress=*/false, pause));
      json["n_saved"] = slot.held().size();
      json["n_written"] = bytes;
      json["timings"] = {{"save_ms", ms_since(begin)}};
      return {};
    }
    const auto loaded = slot.restore(*recipe, *path, salt, pause);
    if (!loaded.ok()) {
      const Code code = loaded.status().code();
      if (code == Code::kCorrupt || code == Code::kInvalidArgument) refusal = 409;
      return loaded.status();
    }
    const KvRestored& restored = *loaded;
    json["n_restored"] = restored.tokens;
    json["n_read"] = restored.bytes_mapped + restored.bytes_copied;
    json["timings"] = {{"restore_ms", ms_since(begin)}};
    return {};
  });
  done(s, json);
}

}  // namespace longkv::server
