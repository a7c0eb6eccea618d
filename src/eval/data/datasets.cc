#include "eval/data/datasets.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "eval/data/csv_reader.h"
#include "eval/text.h"

namespace longkv {

namespace {

namespace fs = std::filesystem;

const std::vector<std::string>& kinds() {
  static const std::vector<std::string> list = {"ruler",         "longbench",   "longbench2",
                                                "infinitebench", "needlebench", "gsm_infinite",
                                                "kvpress",       "squad",       "hotpotqa"};
  return list;
}

bool is_zip(const std::string& path) { return fs::path(path).extension() == ".zip"; }
bool is_records(const std::string& name) {
  return name.ends_with(".jsonl") || name.ends_with(".json") || name.ends_with(".jsonl.gz") || name.ends_with(".csv");
}

std::string stem_of(const std::string& path) {
  std::string name = fs::path(path).filename().string();
  name = name.substr(0, name.find('.'));
  return name == "validation" ? fs::path(path).parent_path().filename().string() : name;
}

// Side files of benchmarks, which hold no samples.
bool is_side_file(const std::string& stem) {
  static const std::vector<std::string> names = {"dataset2prompt", "dataset2maxlen", "dataset_infos",   "config",
                                                 "needles",        "names",          "PaulGrahamEssays"};
  return std::find(names.begin(), names.end(), stem) != names.end();
}

Result<std::vector<DataFile>> list_files(const std::string& path) {
  std::vector<DataFile> files;
  std::error_code error;
  const auto add_zip = [&](const std::string& zip) -> Status {
    LONGKV_ASSIGN(const auto members, list_zip(zip));
    for (const ZipMember& m : members) {
      if (is_records(m.name) && !m.name.starts_with("__MACOSX")) files.push_back({zip, m.name, m, stem_of(m.name)});
    }
    return {};
  };
  if (!fs::is_directory(path, error)) {
    if (is_zip(path)) {
      LONGKV_TRY(add_zip(path));
    } else {
      files.push_back({path, "", {}, stem_of(path)});
    }
  } else {
    std::vector<std::string> paths;
    fs::recursive_directory_iterator it(path, error), end;
    for (; !error && it != end; it.increment(error)) {
      if (it.depth() > 3) it.disable_recursion_pending();
      if (it->is_regular_file(error)) paths.push_back(it->path().string());
    }
    if (error) return fail(Code::kIo, "cannot read the folder '{}': {}", path, error.message());
    std::sort(paths.begin(), paths.end());
    for (const std::string& p : paths) {
      if (is_zip(p)) LONGKV_TRY(add_zip(p));
      if (is_records(p)) files.push_back({p, "", {}, stem_of(p)});
    }
  }
  std::erase_if(files, [](const DataFile& f) { return is_side_file(f.stem); });
  if (files.empty()) return fail(Code::kInvalidArgument, "'{}' has no .jsonl, .json, .csv or .zip with records", path);
  return files;
}

Result<std::unique_ptr<ByteSource>> open_source(const DataFile& file) {
  return file.member.empty() ? open_packed_source(file.path) : open_zip_member(file.path, file.zip);
}

std::string display(const DataFile& file) { return file.member.empty() ? file.path : file.path + ":" + file.member; }

// By the fields of a record, as the benchmarks write them.
std::string kind_of(const nlohmann::json& r) {
  if (r.contains("retrieval_question")) return "needlebench";
  if (r.contains("choice_A")) return "longbench2";
  if (r.contains("all_classes")) return "longbench";
  if (r.contains("outputs") && r.contains("input")) return "ruler";
  if (r.contains("answer_prefix") && r.contains("question")) return "kvpress";
  if (r.contains("op")) return "gsm_infinite";
  if (r.contains("context") && r.contains("input") && r.contains("answer")) return "infinitebench";
  return {};
}

// A flat object of texts or numbers beside the data: dataset2prompt.json and its like.
template <class Value>
Result<std::map<std::string, Value>> side_file(const std::string& path, const char* name) {
  std::map<std::string, Value> out;
  std::error_code error;
  fs::path folder = fs::is_directory(path, error) ? fs::path(path) : fs::path(path).parent_path();
  for (const fs::path& candidate :
       {folder / name, folder / "config" / name, folder / ".." / name, folder / ".." / "config" / name}) {
    if (!fs::is_regular_file(candidate, error)) continue;
    LONGKV_ASSIGN(const std::string text, read_packed_file(candidate.string(), uint64_t(1) << 24));
    const auto json = nlohmann::json::parse(text, nullptr, false);
    if (!json.is_object()) return fail(Code::kCorrupt, "'{}' is no JSON object", candidate.string());
    for (const auto& [key, value] : json.items()) {
      if constexpr (std::is_same_v<Value, std::string>) {
        if (value.is_string()) out[key] = value.template get<std::string>();
      } else {
        if (value.is_number_integer()) out[key] = value.template get<Value>();
      }
    }
    return out;
  }
  return out;
}

Result<RecordAdapter> adapter_for(const std::string& kind, const std::string& path) {
  if (kind == "ruler") return ruler_adapter();
  if (kind == "longbench2") return longbench2_adapter();
  if (kind == "infinitebench") return infinitebench_adapter();
  if (kind == "gsm_infinite") return gsm_infinite_adapter();
  if (kind == "kvpress") return kvpress_adapter();
  LONGKV_ASSIGN(const auto prompts, side_file<std::string>(path, "dataset2prompt.json"));
  LONGKV_ASSIGN(const auto caps, side_file<int64_t>(path, "dataset2maxlen.json"));
  return longbench_adapter(prompts, caps);
}

// Records of a file, as JSON or as rows of CSV.
Status each_record(const DataFile& file, std::string& sha256,
                   const std::function<Result<bool>(const nlohmann::json&, const std::string& where)>& visit) {
  LONGKV_ASSIGN(auto source, open_source(file));
  if (display(file).ends_with(".csv")) {
    CsvReader reader(std::move(source), display(file));
    while (true) {
      LONGKV_ASSIGN(const auto record, reader.next());
      if (!record) break;
      LONGKV_ASSIGN(const bool more, visit(*record, reader.where()));
      if (!more) return {};
    }
    sha256 = reader.sha256_so_far();
    return {};
  }
  RecordReader reader(std::move(source), display(file));
  while (true) {
    LONGKV_ASSIGN(const auto record, reader.next());
    if (!record) break;
    LONGKV_ASSIGN(const bool more, visit(*record, reader.where()));
    if (!more) return {};
  }
  sha256 = reader.sha256_so_far();
  return {};
}

Status read_file(const DataFile& file, const DatasetRequest& request, const RecordAdapter& adapter, Dataset& dataset) {
  std::map<std::string, SampleChoice> choices;
  std::map<std::string, int64_t> counts;
  std::string sha256;
  LONGKV_TRY(each_record(file, sha256, [&](const nlohmann::json& record, const std::string& where) -> Result<bool> {
    // The task is the record's own word where the benchmark has one.
    std::string task = dataset.kind == "longbench" ? text_field(record, "dataset", file.stem)
                       : dataset.kind == "kvpress" ? text_field(record, "task", file.stem)
                                                   : file.stem;
    if (!request.tasks.empty() && std::find(request.tasks.begin(), request.tasks.end(), task) == request.tasks.end()) {
      return true;
    }
    const int64_t index = counts[task]++;
    auto [choice, fresh] = choices.try_emplace(task, request.seed, task, request.samples);
    if (!choice->second.wants(index)) return true;
    auto sample = adapter(record, task);
    if (!sample.ok()) return sample.status().with_context(where);
    sample->id.task = task;
    sample->id.root = request.seed;
    sample->id.index = index;
    choice->second.take(index, std::move(sample).value());
    return true;
  }));
  dataset.files.push_back({display(file), sha256});
  for (auto& [task, choice] : choices) choice.move_to(dataset.samples);
  return {};
}

}  // namespace

std::pair<std::string, std::string> split_dataset_name(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  if (colon == std::string::npos || std::find(kinds().begin(), kinds().end(), kind) == kinds().end()) return {"", text};
  return {kind, text.substr(colon + 1)};
}

Result<Dataset> read_dataset(const DatasetRequest& request) {
  std::error_code error;
  if (!fs::exists(request.path, error))
    return fail(Code::kIo, "cannot open '{}': no such file or folder", request.path);
  const bool needles = fs::exists(fs::path(request.path) / "needles.jsonl", error);
  if (request.kind == "needlebench" || (request.kind.empty() && needles)) return read_needlebench(request.path);
  if (request.kind == "squad" || request.kind == "hotpotqa") return read_questions(request.path, request.kind);
  Dataset dataset;
  dataset.kind = request.kind;
  LONGKV_ASSIGN(const auto files, list_files(request.path));
  for (const DataFile& file : files) {
    if (dataset.kind.empty()) {
      std::string ignored;
      LONGKV_TRY(each_record(file, ignored, [&](const nlohmann::json& record, const std::string&) -> Result<bool> {
        dataset.kind = kind_of(record);
        return false;
      }));
      if (dataset.kind.empty() || dataset.kind == "needlebench") {
        return fail(Code::kInvalidArgument, "'{}' is not recognised; name what it is before a colon: {}", display(file),
                    join(kinds(), ", "));
      }
    }
    LONGKV_ASSIGN(const RecordAdapter adapter, adapter_for(dataset.kind, request.path));
    LONGKV_TRY(read_file(file, request, adapter, dataset));
  }
  if (dataset.kind == "longbench") LONGKV_TRY(use_jieba(request.jieba, dataset));
  if (dataset.samples.empty()) {
    return fail(Code::kInvalidArgument, "'{}' has no samples{}", request.path,
                request.tasks.empty() ? "" : " of " + join(request.tasks, ", "));
  }
  return dataset;
}

uint64_t SampleChoice::rank(int64_t index) const {
  const std::string text = fmt::format("{}|{}", task_, index);
  return XXH64(text.data(), text.size(), seed_);
}

bool SampleChoice::wants(int64_t index) const {
  return int64_t(kept_.size()) < samples_ || (samples_ > 0 && std::pair(rank(index), index) < kept_.rbegin()->first);
}

void SampleChoice::take(int64_t index, EvalSample sample) {
  kept_.emplace(std::pair(rank(index), index), std::move(sample));
  if (int64_t(kept_.size()) > samples_) kept_.erase(std::prev(kept_.end()));
}

void SampleChoice::move_to(std::vector<EvalSample>& samples) {
  const size_t first = samples.size();
  for (auto& [key, sample] : kept_) samples.push_back(std::move(sample));
  std::sort(samples.begin() + int64_t(first), samples.end(),
            [](const EvalSample& a, const EvalSample& b) { return a.id.index < b.id.index; });
  kept_.clear();
}

std::string text_field(const nlohmann::json& record, const char* name, const std::string& fallback) {
  const auto found = record.find(name);
  if (found == record.end() || found->is_null() || found->is_structured()) return fallback;
  return found->is_string() ? found->get<std::string>() : found->dump();
}

std::vector<std::string> texts_field(const nlohmann::json& record, const char* name) {
  std::vector<std::string> out;
  const auto found = record.find(name);
  if (found == record.end()) return out;
  const auto add = [&](const nlohmann::json& value) {
    if (value.is_string()) {
      out.push_back(value.get<std::string>());
    } else if (value.is_number() || value.is_boolean()) {
      out.push_back(value.dump());
    }
  };
  if (!found->is_array()) {
    add(*found);
    return out;
  }
  for (const nlohmann::json& value : *found) {
    if (value.is_array()) {
      for (const nlohmann::json& inner : value) add(inner);
    } else {
      add(value);
    }
  }
  return out;
}

}  // namespace longkv
