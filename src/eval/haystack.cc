#include "eval/haystack.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "eval/sha256.h"
#include "eval/story.h"
#include "eval/text.h"

namespace longkv {

namespace {

namespace fs = std::filesystem;

Result<std::string> read_haystack(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    std::vector<std::string> files;
    for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
      if (it->path().extension() == ".txt") files.push_back(it->path().string());
    }
    if (error) return fail(Code::kIo, "cannot read the folder '{}': {}", path, error.message());
    if (files.empty()) return fail(Code::kInvalidArgument, "'{}' has no *.txt files", path);
    std::sort(files.begin(), files.end());
    std::string text;
    for (const std::string& file : files) {
      LONGKV_ASSIGN(const std::string part, read_packed_file(file));
      text += part + "\n\n";
    }
    return text;
  }
  LONGKV_ASSIGN(std::string text, read_packed_file(path));
  if (fs::path(path).extension() != ".json") return text;
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("text") || !json["text"].is_string()) {
    return fail(Code::kInvalidArgument, "'{}' is not an object with a string \"text\"", path);
  }
  return json["text"].get<std::string>();
}

}  // namespace

std::vector<std::string> split_sentences(const std::string& text, size_t limit) {
  std::vector<std::string> sentences;
  std::string now;
  const auto flush = [&] {
    if (!now.empty()) sentences.push_back(std::exchange(now, {}));
  };
  int breaks = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : '\n';
    const bool white = c == ' ' || (c >= '\t' && c <= '\r');
    if (!white) {
      if (breaks > 1) flush();
      breaks = 0;
      continue;
    }
    if (i > begin) {
      const std::string word = text.substr(begin, i - begin);
      if (!now.empty() && now.size() + word.size() >= limit) flush();
      now += (now.empty() ? "" : " ") + word;
      // A quotation mark or bracket may follow the full stop.
      const size_t last = word.find_last_not_of("\"')]");
      if (last != std::string::npos && (word[last] == '.' || word[last] == '!' || word[last] == '?')) flush();
    }
    breaks += c == '\n' ? 1 : 0;
    begin = i + 1;
  }
  flush();
  return sentences;
}

Haystack Haystack::grammar() { return {}; }

Result<Haystack> Haystack::open(const std::string& path) {
  LONGKV_ASSIGN(const std::string text, read_haystack(path));
  if (const auto bad = first_bad_utf8(text)) {
    return fail(Code::kInvalidArgument, "'{}' is not UTF-8: byte 0x{:02x} at offset {}; convert it first (iconv)", path,
                uint8_t(text[*bad]), *bad);
  }
  Haystack haystack;
  auto sentences = std::make_shared<std::vector<std::string>>(split_sentences(text));
  if (sentences->empty()) return fail(Code::kInvalidArgument, "'{}' has no text", path);
  haystack.text_ = std::move(sentences);
  haystack.name_ = fs::path(path).filename().string();
  if (haystack.name_.empty()) haystack.name_ = path;
  haystack.sha256_ = ::longkv::sha256(text);
  return haystack;
}

std::vector<std::string> Haystack::sentences(EvalRandom random, int64_t n) const {
  std::vector<std::string> out;
  if (!text_) {
    for (int64_t i = 0; i < n; ++i) out.push_back(story_sentence(random));
    return out;
  }
  const uint64_t first = random.below(text_->size());
  for (int64_t i = 0; i < n; ++i) out.push_back((*text_)[size_t((first + uint64_t(i)) % text_->size())]);
  return out;
}

}  // namespace longkv
