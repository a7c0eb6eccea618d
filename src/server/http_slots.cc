// POST /slots/N?action=save|restore|erase.
#include <algorithm>
#include <chrono>
#include <filesystem>

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
  const auto done = [&](const Status& s, const Json& json) {
    s.ok() ? response.set_content(to_text(json), "application/json") : answer_error(response, api_error(s));
  };
  const std::string action = request.get_param_value("action");
  const int id = std::stoi(request.matches[1].str());
  const std::string salt = client_salt(request);
  if (action == "erase") {
    int64_t erased = 0;
    const Status s = service.scheduler().with_idle_slot(id, [&](Slot& slot) {
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
  nlohmann::ordered_json body;
  if (const auto error = parse_body(request.body, body)) return answer_error(response, *error);
  Fields fields(body);
  const auto name = fields.text("filename", 128);
  const auto kv = fields.text("kv", 4096);
  if (!name) fields.fail("filename", "'filename' is missing");
  if (const auto& error = fields.finish()) return answer_error(response, *error);
  const auto path = file_in(options.slot_folder, *name);
  if (!path.ok()) return done(path.status(), {});
  if (action == "restore" && !std::filesystem::exists(*path))
    return answer_error(response, {404, "not_found_error", "there is no saved slot '" + *name + "'", "filename"});
  const auto begin = std::chrono::steady_clock::now();
  Json json = {{"id_slot", id}, {"filename", *name}};
  const Status s = service.scheduler().with_idle_slot(id, [&](Slot& slot) -> Status {
    if (action == "save") {
      // Nobody reads by way of a file what the slot would not have shared.
      if (slot.salt() != salt && !slot.held().empty())
        return fail(Code::kInvalidArgument, "slot {} holds rows of another client", id);
      LONGKV_ASSIGN(const uint64_t bytes, save_session(slot.session(), *path));
      json["n_saved"] = slot.held().size();
      json["n_written"] = bytes;
      json["timings"] = {{"save_ms", ms_since(begin)}};
      return {};
    }
    std::shared_ptr<const Recipe> recipe = service.options().recipes.front().recipe;
    if (kv) {
      LONGKV_ASSIGN(recipe, service.find_recipe(*kv));
    }
    LONGKV_ASSIGN(const KvRestored restored, slot.restore(*recipe, *path, salt));
    json["n_restored"] = restored.tokens;
    json["n_read"] = restored.bytes_mapped + restored.bytes_copied;
    json["timings"] = {{"restore_ms", ms_since(begin)}};
    return {};
  });
  done(s, json);
}

}  // namespace longkv::server
