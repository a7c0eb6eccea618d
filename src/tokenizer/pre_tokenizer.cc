#include "tokenizer/pre_tokenizer.h"

namespace longkv {

namespace {

using Stages = std::array<Scanner, kMaxSplitStages>;

constexpr Stages kGpt2 = {scan::gpt2};
constexpr Stages kDigitsThenGpt2 = {scan::one_number, scan::gpt2};
constexpr Stages kDefault = {scan::punctuation_default, scan::gpt2, scan::numbers, scan::three_digits};
constexpr Stages kFalcon = {scan::punctuation_falcon, scan::gpt2, scan::three_digits};
constexpr Stages kLlama3 = {scan::llama3};
constexpr Stages kQwen2 = {scan::qwen2};
constexpr Stages kQwen35 = {scan::qwen35};
constexpr Stages kTekken = {scan::tekken};
constexpr Stages kGpt4o = {scan::gpt4o};
constexpr Stages kDeepSeekLlm = {scan::one_line_break, scan::spaced_cased_letters, scan::spaced_marks_ascii,
                                 scan::trailing_space, scan::east_asian,           scan::numbers};
constexpr Stages kDeepSeekCoder = {scan::one_line_break, scan::spaced_letters, scan::spaced_punctuation,
                                   scan::east_asian, scan::one_number};

constexpr PreTokenizer kPreTokenizers[] = {
    {"default", kDefault},
    {"gpt-2", kGpt2},
    {"phi-2", kGpt2},
    {"mpt", kGpt2},
    {"olmo", kGpt2},
    {"jais", kGpt2},
    {"llama-bpe", kLlama3, true, true},
    {"llama3", kLlama3, true, true},
    {"llama-v3", kLlama3, true, true},
    {"falcon3", kLlama3, true, true},
    {"lfm2", kLlama3, true, true},
    {"pixtral", kLlama3, true, true},
    {"dbrx", kLlama3},
    {"smaug-bpe", kLlama3},
    {"qwen2", kQwen2},
    {"deepseek-r1-qwen", kQwen2},
    {"stablelm2", kQwen2},
    {"qwen35", kQwen35},
    {"tekken", kTekken, true, true},
    {"gpt-4o", kGpt4o},
    {"llama4", kGpt4o},
    {"deepseek-llm", kDeepSeekLlm},
    {"deepseek-coder", kDeepSeekCoder},
    {"falcon", kFalcon},
    {"smollm", kDigitsThenGpt2},
    {"starcoder", kDigitsThenGpt2},
    {"refact", kDigitsThenGpt2},
    {"command-r", kDigitsThenGpt2},
    {"codeshell", kDigitsThenGpt2},
    {"exaone", kDigitsThenGpt2},
    {"minerva-7b", kDigitsThenGpt2},
};

}  // namespace

const PreTokenizer* find_pre_tokenizer(std::string_view name) {
  if (name.empty()) name = "default";
  for (const PreTokenizer& rules : kPreTokenizers) {
    if (rules.name == name) return &rules;
  }
  return nullptr;
}

std::string known_pre_tokenizers() {
  std::string names;
  for (const PreTokenizer& rules : kPreTokenizers) {
    if (!names.empty()) names += ", ";
    names += rules.name;
  }
  return names;
}

WordSplitter::WordSplitter(const PreTokenizer& rules, std::string_view text) : rules_(rules), text_(text) {
  while (stage_count_ < kMaxSplitStages && rules.stages[static_cast<size_t>(stage_count_)] != nullptr) ++stage_count_;
  segment_end_[0] = text.size();
}

std::string_view WordSplitter::next() {
  if (pos_ >= text_.size()) return {};
  // Descend from the innermost segment that still has text; a stage sees only its parent's segment.
  for (int stage = open_; stage < stage_count_; ++stage) {
    const auto s = static_cast<size_t>(stage);
    segment_end_[s + 1] = rules_.stages[s](CharReader(text_.data(), segment_end_[s]), pos_);
  }
  const std::string_view word = text_.substr(pos_, segment_end_[static_cast<size_t>(stage_count_)] - pos_);
  pos_ += word.size();
  open_ = stage_count_ - 1;
  while (open_ > 0 && segment_end_[static_cast<size_t>(open_)] == pos_) --open_;
  return word;
}

}  // namespace longkv
