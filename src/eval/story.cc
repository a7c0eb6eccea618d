#include "eval/story.h"

#include <fmt/format.h>

#include <algorithm>

#include "eval/words.h"

namespace longkv {

namespace {

std::string person_name(EvalRandom& random) { return random.pick(eval_people()) + " " + random.pick(eval_families()); }

std::string small_number(EvalRandom& random) {
  static const std::vector<std::string> words = {"two",   "three", "four",   "five",     "six",     "seven",
                                                 "eight", "nine",  "eleven", "fourteen", "sixteen", "twenty"};
  return random.pick(words);
}

}  // namespace

std::string story_sentence(EvalRandom& random) {
  const auto adjective = [&] { return random.pick(eval_adjectives()); };
  const auto noun = [&] { return random.pick(eval_nouns()); };
  const auto place = [&] { return random.pick(eval_places()); };
  static const std::vector<std::string> times = {"In the morning",  "Before noon",       "Towards evening",
                                                 "That night",      "A week later",      "When the rain stopped",
                                                 "On the next day", "After the harvest", "By candlelight"};
  static const std::vector<std::string> verbs = {"crossed", "drew",   "described", "painted",  "passed",  "mended",
                                                 "found",   "feared", "admired",   "measured", "circled", "remembered"};
  static const std::vector<std::string> ways = {"slowly",  "with some care", "for an hour", "without a word", "twice",
                                                "at last", "in the wind",    "by chance",   "against advice", "gladly"};
  static const std::vector<std::string> sayings = {"nobody had asked about", "the children talked of",
                                                   "the miller never liked", "the old songs mention",
                                                   "travellers often miss",  "the council had forgotten"};
  switch (random.below(8)) {
    case 0:
      return fmt::format("{} the {} {} stood beside the {} of {}.", random.pick(times), adjective(), noun(), noun(),
                         place());
    case 1:
      return fmt::format("{} {} the {} {} {}.", person_name(random), random.pick(verbs), adjective(), noun(),
                         random.pick(ways));
    case 2:
      return fmt::format("Near {} there was a {} {} that {}.", place(), adjective(), noun(), random.pick(sayings));
    case 3:
      return fmt::format("{} {} {} the {} {}, and the {} was {} again.", random.pick(times), person_name(random),
                         random.pick(verbs), adjective(), noun(), noun(), adjective());
    case 4:
      return fmt::format("It took {} days to walk from {} to {}, past a {} {}.", small_number(random), place(), place(),
                         adjective(), noun());
    case 5:
      return fmt::format("The {} of {} was {}, {} and rather {}.", noun(), place(), adjective(), adjective(),
                         adjective());
    case 6:
      return fmt::format("\"The {} is {} this year,\" said {}, \"but the {} is not.\"", noun(), adjective(),
                         person_name(random), noun());
    default:
      return fmt::format("{} counted {} {} {}s and wrote the number down {}.", person_name(random),
                         small_number(random), adjective(), noun(), random.pick(ways));
  }
}

int64_t story_chapters_limit() { return int64_t(eval_people().size() * eval_families().size()); }

std::vector<StoryChapter> story_chapters(EvalRandom& random, int64_t n, const std::vector<int64_t>& quiet,
                                         int64_t sentences) {
  const std::vector<int64_t> who = random.distinct(story_chapters_limit(), n);
  const auto families = int64_t(eval_families().size());
  std::vector<StoryChapter> chapters;
  for (int64_t i = 0; i < n; ++i) {
    StoryChapter c;
    const auto person = size_t(who[size_t(i)] / families), family = size_t(who[size_t(i)] % families);
    c.person = eval_people()[person] + " " + eval_families()[family];
    c.place = random.pick(eval_places());
    const std::vector<int64_t> goods = random.distinct(int64_t(eval_goods().size()), 2);
    c.sold = eval_goods()[size_t(goods[1])];
    const bool buys = std::find(quiet.begin(), quiet.end(), i) == quiet.end();
    if (buys) c.bought = eval_goods()[size_t(goods[0])];
    c.sentences.push_back(fmt::format("\n\nChapter {}.", i + 1));
    c.sentences.push_back(fmt::format("{} came to {}.", c.person, c.place));
    // The facts stand at the end of a chapter, so that its heading alone does not show them.
    for (int64_t s = 4; s < sentences; ++s) c.sentences.push_back(story_sentence(random));
    c.sentences.push_back(buys ? fmt::format("{} bought {} there.", c.person, c.bought)
                               : fmt::format("{} bought nothing there.", c.person));
    c.sentences.push_back(fmt::format("Then {} sold {} and went away.", c.person, c.sold));
    chapters.push_back(std::move(c));
  }
  return chapters;
}

}  // namespace longkv
