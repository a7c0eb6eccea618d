// A result as a line of JSON and back.
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "eval/store.h"

namespace longkv {

namespace {

// Calls visit(name, member) for every field, so that reading and writing cannot differ.
template <class Record, class Visit>
void each_field(Record& r, const Visit& visit) {
  visit("suite", r.suite);
  visit("task", r.task);
  visit("version", r.version);
  visit("length", r.length);
  visit("depth", r.depth);
  visit("real_depth", r.real_depth);
  visit("index", r.index);
  visit("seed", r.seed);
  visit("kv", r.kv);
  visit("kv_label", r.label);
  visit("question", r.question);
  visit("sparse", r.sparse);
  visit("metric", r.metric);
  visit("skipped", r.skipped);
  visit("score", r.score);
  visit("text", r.text);
  visit("finish", r.finish);
  visit("references", r.references);
  visit("candidates", r.candidates);
  visit("answer_hash", r.answer_hash);
  visit("prompt_hash", r.prompt_hash);
  visit("prompt_tokens", r.prompt_tokens);
  visit("document_tokens", r.document_tokens);
  visit("new_tokens", r.new_tokens);
  visit("answer_tokens", r.answer_tokens);
  visit("units", r.units);
  visit("compared", r.compared);
  visit("kl_mean", r.kl_mean);
  visit("kl_max", r.kl_max);
  visit("same_top", r.same_top);
  visit("kl_buckets", r.kl_buckets);
  visit("checked", r.checked);
  visit("captured_mass", r.captured_mass);
  visit("output_error", r.output_error);
  visit("layer_mass", r.layer_mass);
  visit("head_mass", r.head_mass);
  visit("read_on", r.read_on);
  visit("jobs", r.jobs);
  visit("shared_prefill", r.shared_prefill);
  visit("prefill_seconds", r.prefill_seconds);
  visit("seconds_per_token", r.seconds_per_token);
  visit("kept_rows", r.kept_rows);
  visit("kept_bytes", r.kept_bytes);
  visit("index_bytes", r.index_bytes);
  visit("rows_attended", r.rows_attended);
  visit("bytes_per_token", r.bytes_per_token);
}

void read(const nlohmann::json& j, std::string& value) { value = j.get_ref<const std::string&>(); }
void read(const nlohmann::json& j, bool& value) { value = j.get<bool>(); }
void read(const nlohmann::json& j, double& value) { value = j.get<double>(); }
template <class T>
void read(const nlohmann::json& j, std::vector<T>& value) {
  value = j.get<std::vector<T>>();
}
template <class T>
void read(const nlohmann::json& j, T& value) {
  value = j.get<T>();
}

template <class T>
bool fits(const nlohmann::json& j, const T&) {
  return j.is_number_integer();
}
bool fits(const nlohmann::json& j, const std::string&) { return j.is_string(); }
bool fits(const nlohmann::json& j, const bool&) { return j.is_boolean(); }
bool fits(const nlohmann::json& j, const double&) { return j.is_number(); }
bool fits(const nlohmann::json& j, const std::vector<double>&) {
  return j.is_array() && std::all_of(j.begin(), j.end(), [](const auto& x) { return x.is_number(); });
}
bool fits(const nlohmann::json& j, const std::vector<std::string>&) {
  return j.is_array() && std::all_of(j.begin(), j.end(), [](const auto& x) { return x.is_string(); });
}

}  // namespace

std::string EvalRecord::key() const {
  return fmt::format("{}|{}|{}|{}|{:.3f}|{}|{}", suite, task, version, length, depth, index, kv);
}

nlohmann::ordered_json EvalRecord::to_json() const {
  nlohmann::ordered_json j;
  each_field(*this, [&](const char* name, const auto& value) { j[name] = value; });
  return j;
}

Result<EvalRecord> EvalRecord::from_json(const nlohmann::json& json) {
  if (!json.is_object()) return fail(Code::kCorrupt, "an object is expected");
  EvalRecord record;
  Status status;
  each_field(record, [&](const char* name, auto& value) {
    const auto found = json.find(name);
    if (found == json.end() || !fits(*found, value)) {
      if (status.ok()) {
        status = fail(Code::kCorrupt, "field \"{}\" is {}", name, found == json.end() ? "missing" : "of another type");
      }
      return;
    }
    read(*found, value);
  });
  LONGKV_TRY(status);
  return record;
}

}  // namespace longkv
