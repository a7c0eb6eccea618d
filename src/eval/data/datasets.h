// Users' own copies of benchmarks as samples. longkv holds no prompt of theirs: templates are read from the user's
// files where the benchmark ships them, else worded here and marked by the suite's name ("longbench/own").
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "eval/data/record_reader.h"
#include "eval/sample.h"
#include "eval/tasks.h"
#include "longkv/status.h"

namespace longkv {

struct DatasetRequest {
  // ruler, longbench, longbench2, infinitebench, needlebench, gsm_infinite, kvpress, squad, hotpotqa; empty: detected.
  std::string kind;
  std::string path;     // file or folder
  int64_t samples = 0;  // of each task, chosen by the seed; a larger number adds to a smaller one's
  uint64_t seed = 1;
  std::vector<std::string> tasks;  // only these; empty: all
  // LongBench's Chinese answers are cut into words by the package jieba in this folder. Empty: where one is installed;
  // without any, answers are compared by characters, and a notice says so.
  std::string jieba;
};

struct DatasetFile {
  std::string name, sha256;
};

struct Dataset {
  std::string kind;
  std::vector<EvalSample> samples;
  std::vector<EvalTask> tasks;  // that are made to a length from the user's files (needlebench, squad, hotpotqa)
  std::vector<DatasetFile> files;
};

// "longbench:/data/data.zip" or a path alone. Errors: kIo, kCorrupt (line and byte offset), kInvalidArgument (unknown
// kind, nothing recognised, no such task).
Result<Dataset> read_dataset(const DatasetRequest& request);
// "KIND:PATH" in two; the kind is empty where none of the known ones stands before the colon.
std::pair<std::string, std::string> split_dataset_name(const std::string& text);

// One file of records: plain, gzip, or a member of an archive.
struct DataFile {
  std::string path, member;  // member: of the archive at `path`; else empty
  ZipMember zip;
  std::string stem;  // file name without folders and extension; RULER's validation.jsonl: its folder's name
};

// Keeps the samples with the smallest hashes of (seed, task, index): a choice that grows with its size.
class SampleChoice {
 public:
  SampleChoice(uint64_t seed, std::string task, int64_t samples)
      : seed_(seed), task_(std::move(task)), samples_(samples) {}
  bool wants(int64_t index) const;
  void take(int64_t index, EvalSample sample);
  // In the order of their indexes.
  void move_to(std::vector<EvalSample>& samples);

 private:
  uint64_t rank(int64_t index) const;
  uint64_t seed_;
  std::string task_;
  int64_t samples_;
  std::map<std::pair<uint64_t, int64_t>, EvalSample> kept_;
};

// A record's fields. Numbers stand for their texts; a missing or other field gives `fallback`.
std::string text_field(const nlohmann::json& record, const char* name, const std::string& fallback = {});
// A scalar or a list of them as texts. Lists in lists (code_debug of some copies) are flattened once.
std::vector<std::string> texts_field(const nlohmann::json& record, const char* name);

// Turns one record into a sample of `task`; an error says what is missing.
using RecordAdapter = std::function<Result<EvalSample>(const nlohmann::json& record, const std::string& task)>;
RecordAdapter ruler_adapter();
RecordAdapter longbench_adapter(const std::map<std::string, std::string>& prompts,
                                const std::map<std::string, int64_t>& caps);
// Chinese answers of LongBench's samples are compared by the words of jieba in `folder`, or as DatasetRequest::jieba
// says.
Status use_jieba(const std::string& folder, Dataset& dataset);
RecordAdapter longbench2_adapter();
RecordAdapter infinitebench_adapter();
RecordAdapter gsm_infinite_adapter();
RecordAdapter kvpress_adapter();
// NeedleBench's single needle, English or Chinese, out of a folder.
Result<Dataset> read_needlebench(const std::string& folder);
// RULER's question tasks out of SQuAD's ("squad") or HotpotQA's file.
Result<Dataset> read_questions(const std::string& path, const std::string& kind);

}  // namespace longkv
