// The long text in which facts are hidden: sentences of the story grammar or of the user's files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "eval/random.h"
#include "longkv/status.h"

namespace longkv {

class Haystack {
 public:
  static Haystack grammar();
  // A text file, a .gz of one, a folder of *.txt (joined in the order of their names), or an object {"text": ...} in a
  // .json file. Errors: kIo, kInvalidArgument (no text, not UTF-8: with the offset).
  static Result<Haystack> open(const std::string& path);

  // n sentences without blanks around them. Those of a file begin at a random one and go on in order, from the file's
  // beginning again after its end.
  std::vector<std::string> sentences(EvalRandom random, int64_t n) const;
  // Sentences before any is repeated; 0: never.
  int64_t distinct() const { return text_ ? int64_t(text_->size()) : 0; }

  const std::string& name() const { return name_; }      // "grammar", or the file's name
  const std::string& sha256() const { return sha256_; }  // of the text; empty for the grammar

 private:
  std::shared_ptr<const std::vector<std::string>> text_;
  std::string name_ = "grammar", sha256_;
};

// Sentences of a text: cut after . ! ? and at empty lines, white space as one blank, none longer than `limit` bytes.
std::vector<std::string> split_sentences(const std::string& text, size_t limit = 240);

}  // namespace longkv
