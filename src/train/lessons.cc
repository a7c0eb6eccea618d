#include "train/lessons.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "eval/random.h"

namespace longkv {

namespace {

constexpr int64_t kMinTokens = 256;

// Numbers of a lesson, from the half of all seeds that no evaluation draws from.
class Draw : public EvalRandom {
 public:
  Draw(uint64_t seed, uint64_t index, std::string_view stream = "lesson")
      : EvalRandom(lesson_seed(seed, index), stream) {}
  template <class T, size_t n>
  const T& of(const T (&list)[n]) {
    return list[below(n)];
  }
};

constexpr const char* kWho[] = {"the miller",    "a young clerk", "the ferryman",  "my neighbour", "the botanist",
                                "an old sailor", "the baker",     "a tired guard", "the teacher",  "her cousin"};
constexpr const char* kDid[] = {"carried",  "mended",   "painted", "forgot", "sold",
                                "measured", "borrowed", "counted", "hid",    "found"};
constexpr const char* kWhat[] = {"a lantern", "the blue door", "two ladders",   "a box of nails", "the map",
                                 "a kettle",  "seven apples",  "the old wheel", "a letter",       "the copper bell"};
constexpr const char* kWhere[] = {"beside the river", "in the market",       "behind the mill", "under the bridge",
                                  "on the hill",      "near the lighthouse", "at the station",  "in the orchard"};
constexpr const char* kWhen[] = {"before sunrise", "after the rain",  "on Tuesday",
                                 "in late autumn", "while it snowed", "that evening"};
constexpr const char* kAdjectives[] = {"amber",  "brisk",  "cobalt", "dusty", "eager",
                                       "frosty", "gentle", "hollow", "ivory", "jolly"};
constexpr const char* kNouns[] = {"anchor", "beacon", "canyon", "dagger", "engine",
                                  "falcon", "garden", "hammer", "island", "jacket"};

std::string sentence(Draw& draw) {
  std::string s =
      fmt::format(" {} {} {} {} {}.", draw.of(kWho), draw.of(kDid), draw.of(kWhat), draw.of(kWhere), draw.of(kWhen));
  s[1] = char(s[1] - 'a' + 'A');
  return s;
}

// What a kind writes: text around pieces, of which as many are taken as fit, and the questions about them.
struct Asked {
  std::string question, answer;
};
struct Draft {
  std::string kind, head, tail;
  std::vector<std::string> pieces;
  std::string separator;
  std::vector<Asked> asked;
};

Draft pairs(Draw& draw, int64_t pieces, int64_t questions) {
  Draft d{"pairs", "Extract the value of the specified key from the JSON object below.\n\nJSON data:\n{", "}", {}, ", ",
          {}};
  const uint64_t form = draw.below(3);
  std::vector<std::pair<std::string, std::string>> all;
  for (int64_t i = 0; i < pieces; ++i) {
    if (form == 0) all.emplace_back(draw.uuid(), draw.uuid());
    if (form == 1) all.emplace_back(draw.hex(8), fmt::format("{}", 1000000 + draw.below(9000000)));
    if (form == 2) all.emplace_back(draw.hex(12), draw.uuid());
    d.pieces.push_back(fmt::format("\"{}\": \"{}\"", all.back().first, all.back().second));
  }
  for (int64_t i = 0; i < questions && !all.empty(); ++i) {
    const auto& [key, value] = all[draw.below(all.size())];
    d.asked.push_back({fmt::format("\n\nKey: \"{}\"\nThe value of the specified key is: \"", key), value + "\""});
  }
  return d;
}

// Puts `needles` among the filler at drawn places, in their order.
void hide(Draw& draw, const std::vector<std::string>& needles, std::vector<std::string>& filler) {
  std::vector<uint64_t> places;
  for (size_t i = 0; i < needles.size(); ++i) places.push_back(draw.below(filler.size() + 1));
  std::sort(places.begin(), places.end());
  for (size_t i = needles.size(); i-- > 0;) filler.insert(filler.begin() + int64_t(places[i]), needles[i]);
}

Draft numbers(Draw& draw, std::vector<std::string> filler, int64_t questions) {
  Draft d{"numbers", "Some special magic numbers are hidden within the following text. Memorize them.\n", "", {}, "",
          {}};
  std::vector<std::string> needles;
  for (int64_t i = 0; i < questions; ++i) {
    // The index keeps keys distinct.
    const std::string key =
        fmt::format("{}-{}{}", draw.of(kAdjectives), draw.of(kNouns), i == 0 ? "" : fmt::format("-{}", i));
    const std::string value = fmt::format("{}", 1000000 + draw.below(9000000));
    needles.push_back(fmt::format(" One of the special magic numbers for {} is: {}.", key, value));
    d.asked.push_back(
        {fmt::format("\nWhat is the special magic number for {} mentioned in the provided text? The special magic "
                     "number for {} mentioned in the provided text is",
                     key, key),
         fmt::format(" {}.", value)});
  }
  hide(draw, needles, filler);
  d.pieces = std::move(filler);
  return d;
}

Draft chains(Draw& draw, std::vector<std::string> filler, int64_t questions) {
  Draft d{"chains", "Memorize and track the chains of variable assignment hidden in the following text.\n", "", {}, "",
          {}};
  std::vector<std::string> needles;
  std::string before;
  for (int64_t i = 0; i < questions; ++i) {
    const std::string name = draw.letters(5, 'A');
    const std::string value = i % 3 == 0 ? fmt::format("{}", 10000 + draw.below(90000)) : fmt::format("VAR {}", before);
    needles.push_back(fmt::format(" VAR {} = {}. ", name, value));
    d.asked.push_back({fmt::format("\nWhat is the value of VAR {}? VAR {} =", name, name), fmt::format(" {}.", value)});
    before = name;
  }
  hide(draw, needles, filler);
  d.pieces = std::move(filler);
  return d;
}

std::string text_of(const Draft& d) {
  std::string text = d.head;
  for (size_t i = 0; i < d.pieces.size(); ++i) {
    if (i > 0) text += d.separator;
    text += d.pieces[i];
  }
  return text + d.tail;
}

Result<Question> tokens_of(const Tokenizer& tokenizer, const Asked& asked) {
  Question q;
  LONGKV_ASSIGN(q.ids, tokenizer.encode(asked.question, false, false));
  LONGKV_ASSIGN(const std::vector<int32_t> answer, tokenizer.encode(asked.answer, false, false));
  q.loss_from = int64_t(q.ids.size()) - 1;
  q.ids.insert(q.ids.end(), answer.begin(), answer.end());
  return q;
}

Result<Lesson> continuation(const Tokenizer& tokenizer, const LessonOptions& options, Draw& draw, uint64_t turn,
                            int64_t tokens) {
  constexpr int64_t kBytesPerToken = 16;  // more than any text needs
  Lesson lesson{"text", {}, {}};
  const std::string& text = options.texts[size_t(turn % options.texts.size())];
  const uint64_t wanted = uint64_t((tokens + options.max_chunk) * kBytesPerToken);
  uint64_t begin = text.size() > wanted ? draw.below(text.size() - wanted) : 0;
  while (begin > 0 && (uint8_t(text[begin]) & 0xc0) == 0x80) --begin;  // at the start of a character
  LONGKV_ASSIGN(std::vector<int32_t> ids, tokenizer.encode(std::string_view(text).substr(begin, wanted), true, false));
  if (int64_t(ids.size()) < tokens + options.max_chunk) {
    return fail(
        Code::kInvalidArgument,
        "a text to learn from has {} tokens; a document of {} and {} to continue it are needed: give longer texts "
        "or shorter lengths",
        ids.size(), tokens, options.max_chunk);
  }
  lesson.document.assign(ids.begin(), ids.begin() + tokens);
  // From the document's end backwards, over its last half.
  for (int64_t i = 0; i < options.questions; ++i) {
    const int64_t after = tokens - i * options.max_chunk;
    if (after < tokens / 2) break;
    lesson.questions.push_back({{ids.begin() + after, ids.begin() + after + options.max_chunk}, 0, after});
  }
  return lesson;
}

}  // namespace

uint64_t lesson_seed(uint64_t seed, uint64_t index) {
  return SampleId{SeedSpace::kTrain, seed, "lesson", 1, 0, -1, int64_t(index)}.seed();
}

Result<Lesson> make_lesson(const Tokenizer& tokenizer, const LessonOptions& options, uint64_t index, int64_t tokens) {
  if (tokens < kMinTokens) {
    return fail(Code::kInvalidArgument, "a document to learn from has {} tokens; at least {} are needed", tokens,
                kMinTokens);
  }
  Draw draw(options.seed, index);
  const uint64_t kinds = uint64_t(lesson_kinds(options));
  if (kinds == 0) return fail(Code::kInvalidArgument, "no kind of document to learn from is chosen");
  if (!options.texts.empty() && index % kinds == kinds - 1) {
    return continuation(tokenizer, options, draw, index / kinds, tokens);
  }

  // A piece takes eight tokens at least. The number of pieces that fit follows from the tokens of the whole; a few
  // rounds settle it. Every round draws the same numbers again.
  size_t pieces = size_t(tokens / 8 + 1);
  Lesson lesson;
  Draft draft;
  for (int round = 0; round < 12; ++round) {
    Draw again(options.seed, index);
    if (index % kinds == 0) {
      draft = pairs(again, int64_t(pieces), options.questions);
    } else {
      std::vector<std::string> filler;
      Draw words(options.seed, index, "filler");
      for (size_t i = 0; i < pieces; ++i) filler.push_back(sentence(words));
      draft = index % kinds == 1 ? numbers(again, std::move(filler), options.questions)
                                 : chains(again, std::move(filler), options.questions);
    }
    LONGKV_ASSIGN(lesson.document, tokenizer.encode(text_of(draft), true, false));
    const int64_t n = int64_t(lesson.document.size());
    if (n <= tokens && n >= tokens * 95 / 100) break;
    const size_t next = size_t(double(pieces) * 0.98 * double(tokens) / double(n));
    if (next == pieces && n <= tokens) break;
    pieces = next;
    if (pieces == 0) break;
  }
  lesson.kind = draft.kind;
  if (int64_t(lesson.document.size()) > tokens || pieces == 0) {
    return fail(Code::kInvalidArgument,
                "a document of {} tokens has no room for {} questions: ask fewer or lengthen it", tokens,
                options.questions);
  }
  for (const Asked& asked : draft.asked) {
    LONGKV_ASSIGN(Question q, tokens_of(tokenizer, asked));
    q.after = int64_t(lesson.document.size());
    if (int64_t(q.ids.size()) <= options.max_chunk) lesson.questions.push_back(std::move(q));
  }
  if (lesson.questions.empty()) {
    return fail(Code::kInvalidArgument, "every question has more than {} tokens in this vocabulary", options.max_chunk);
  }
  return lesson;
}

}  // namespace longkv
