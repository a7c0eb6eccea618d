// One or several sentences with a random number, hidden in long text.
#include <fmt/format.h>

#include <algorithm>

#include "eval/tasks.h"
#include "eval/text.h"
#include "eval/words.h"

namespace longkv {

namespace {

std::string hyphened(EvalRandom& random) { return random.pick(eval_adjectives()) + "-" + random.pick(eval_nouns()); }

// `n` keys of which none is a part of another.
std::vector<std::string> draw_keys(EvalRandom& random, int64_t n, bool uuids) {
  std::vector<std::string> keys;
  while (int64_t(keys.size()) < n) {
    std::string key = uuids ? random.uuid() : hyphened(random);
    const bool clash = std::any_of(keys.begin(), keys.end(), [&](const std::string& k) {
      return k.find(key) != std::string::npos || key.find(k) != std::string::npos;
    });
    if (!clash) keys.push_back(std::move(key));
  }
  return keys;
}

enum class NeedleHaystack { kNoise, kText, kNeedles };

struct NeedleShape {
  NeedleHaystack haystack = NeedleHaystack::kText;
  int keys = 1, values = 1, queries = 1;
  bool uuid_keys = false, uuid_values = false;
};

std::string needle_sentence(const char* kind, const std::string& key, const std::string& value) {
  return fmt::format("One of the special magic {} for {} is: {}.", kind, key, value);
}

// Distractors of a haystack of needles: different keys for every number, so that none meets a real one.
std::vector<std::string> needle_units(EvalRandom random, const NeedleShape& shape, const char* kind, int64_t n,
                                      const std::vector<std::string>& keys) {
  std::vector<std::string> units;
  while (int64_t(units.size()) < n) {
    std::string key =
        shape.uuid_keys ? random.uuid() : fmt::format("{}-{}", hyphened(random), random.pick(eval_places()));
    const std::string value = shape.uuid_values ? random.uuid() : random.digits(7);
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) units.push_back(needle_sentence(kind, key, value));
  }
  return units;
}

EvalSample build_needle(const NeedleShape& shape, const TaskRequest& request, int64_t n) {
  const uint64_t seed = request.id.seed();
  EvalRandom random(seed, "needles");
  const char* kind = shape.uuid_values ? "uuids" : "numbers";
  const bool several = shape.values > 1 || shape.queries > 1;
  EvalSample s;
  s.suite = "longkv";
  const std::vector<std::string> keys = draw_keys(random, shape.keys, shape.uuid_keys);
  std::vector<Planted> needles;
  std::vector<std::string> asked;
  for (int k = 0; k < shape.keys; ++k) {
    if (k < shape.queries) asked.push_back(keys[size_t(k)]);
    for (int v = 0; v < shape.values; ++v) {
      const std::string value = shape.uuid_values ? random.uuid() : random.digits(7);
      // Distinct depths, so that several needles never touch.
      const double depth = request.id.depth >= 0 ? request.id.depth : 100 * random.unit();
      needles.push_back({depth, needle_sentence(kind, keys[size_t(k)], value)});
      (k < shape.queries ? s.references : s.distractors).push_back(value);
      if (k < shape.queries) s.facts.push_back(needles.back().text);
    }
  }
  const EvalRandom filler(seed, "filler");
  const std::vector<std::string> units = shape.haystack == NeedleHaystack::kNoise ? noise_sentences(n)
                                         : shape.haystack == NeedleHaystack::kText
                                             ? request.haystack->sentences(filler, n)
                                             : needle_units(filler, shape, kind, n, keys);
  const std::string text = plant(units, needles, " ");
  std::string list = join(asked, ", ");
  if (asked.size() > 1) list.insert(list.rfind(", ") + 2, "and ");
  s.asked = asked.front();
  s.metric = EvalMetric::kAllSubstrings;
  if (request.form == PromptForm::kNeedle10m) {
    // Several values are answered in the order of the text.
    s.context =
        fmt::format("Some special magic {} are hidden within the following text. Memorize them.\n {}", kind, text);
    const std::string noun = several ? fmt::format("special magic {}", kind)
                                     : fmt::format("special magic {}", shape.uuid_values ? "uuid" : "number");
    s.question = several ? fmt::format(
                               "\nWhat are all the {0} for {1} mentioned in the provided text? The {0} for {1} "
                               "mentioned in the provided text are",
                               noun, list)
                         : fmt::format(
                               "\nWhat is the {0} for {1} mentioned in the provided text? The {0} for {1} "
                               "mentioned in the provided text is",
                               noun, list);
    s.stop = ".";
    return s;
  }
  s.context = fmt::format("The text below hides {}. Keep {} in mind: a question about {} comes after the text.\n\n{}",
                          several || shape.keys > 1
                              ? fmt::format("several special magic {}", kind)
                              : fmt::format("one special magic {}", shape.uuid_values ? "uuid" : "number"),
                          several ? "them" : "it", several ? "them" : "it", text);
  if (several) {
    s.question = fmt::format("\n\nWhich special magic {} does the text give for {}? Name all of them.", kind, list);
    s.answer_prefix = fmt::format("The special magic {} that the text gives for {} are", kind, list);
  } else {
    const char* one = shape.uuid_values ? "uuid" : "number";
    s.question = fmt::format("\n\nWhich special magic {} does the text give for {}?", one, list);
    s.answer_prefix = fmt::format("The special magic {} that the text gives for {} is", one, list);
  }
  s.stop = several ? "\n\n" : "\n";
  return s;
}

EvalSample build_passkey(const TaskRequest& request, int64_t n) {
  EvalRandom random(request.id.seed(), "needles");
  const std::string key = random.digits(5);
  EvalSample s;
  s.suite = "longkv";
  s.references = {key};
  s.metric = EvalMetric::kFirstInteger;
  s.facts = {fmt::format("The pass key is {}. Remember it. {} is the pass key.", key, key)};
  const std::string text = plant(noise_sentences(n), {{request.id.depth, s.facts[0]}}, " ");
  s.asked = "pass key";
  if (request.form == PromptForm::kNeedle10m) {
    s.context =
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n " + text + " ";
    s.question = "\nWhat is the pass key? The pass key is";
    s.stop = ".";
    return s;
  }
  s.context =
      "Somewhere in the long and dull text below stands one thing that matters. Find it and remember it; you will be "
      "asked for it.\n\n" +
      text;
  s.question = "\n\nWhat is the pass key?";
  s.answer_prefix = "The pass key is";
  s.stop = "\n";
  return s;
}

EvalSample build_number_string(const TaskRequest& request, int64_t n) {
  EvalRandom random(request.id.seed(), "needles");
  std::string doubled;
  for (const char c : random.digits(5)) doubled += std::string(2, c);
  EvalSample s;
  s.suite = "longkv";
  s.references = {doubled};
  s.metric = EvalMetric::kDigitRun;
  s.facts = {fmt::format("The sequence of digits is {}. Remember it. {} is the sequence of digits.", doubled, doubled)};
  s.context =
      "Somewhere in the long and dull text below stands a sequence of digits. Find it and remember it; you will be "
      "asked for it.\n\n" +
      plant(noise_sentences(n), {{request.id.depth, s.facts[0]}}, " ");
  s.question = "\n\nWhat is the sequence of digits?";
  s.asked = "sequence of digits";
  s.answer_prefix = "The sequence of digits is";
  s.stop = "\n";
  return s;
}

}  // namespace

void add_needle_tasks(std::vector<EvalTask>& tasks) {
  tasks.push_back({"passkey", 1, "five digits said twice in text that repeats", "sentences", 5, int64_t(1) << 40, true,
                   true, build_passkey});
  tasks.push_back({"number_string", 1, "ten digits in pairs, in text that repeats", "sentences", 5, int64_t(1) << 40,
                   true, false, build_number_string});
  const auto add = [&](const char* name, const char* about, NeedleShape shape, bool depth, bool needle_form) {
    tasks.push_back({name, 1, about, "sentences", 8, int64_t(1) << 40, depth, needle_form,
                     [shape](const TaskRequest& r, int64_t n) { return build_needle(shape, r, n); }});
  };
  using H = NeedleHaystack;
  add("niah_single_1", "one number in text that repeats", {H::kNoise, 1, 1, 1, false, false}, true, true);
  add("niah_single_2", "one number in the haystack", {H::kText, 1, 1, 1, false, false}, true, true);
  add("niah_single_3", "one uuid in the haystack", {H::kText, 1, 1, 1, false, true}, true, true);
  add("niah_multikey_1", "one of four keys in the haystack", {H::kText, 4, 1, 1, false, false}, false, true);
  add("niah_multikey_2", "one number among sentences like its own", {H::kNeedles, 1, 1, 1, false, false}, true, true);
  add("niah_multikey_3", "one uuid among sentences of uuids", {H::kNeedles, 1, 1, 1, true, true}, true, true);
  add("niah_multivalue", "all four values of one key", {H::kText, 1, 4, 1, false, false}, false, true);
  add("niah_multiquery", "the values of four keys", {H::kText, 4, 1, 4, false, false}, false, false);
}

}  // namespace longkv
