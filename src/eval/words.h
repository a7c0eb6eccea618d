// Words of the generated tasks. A change of any list is a new version of every task that uses it.
#pragma once

#include <string>
#include <vector>

namespace longkv {

const std::vector<std::string>& eval_adjectives();
const std::vector<std::string>& eval_nouns();
const std::vector<std::string>& eval_people();  // given names
const std::vector<std::string>& eval_families();
const std::vector<std::string>& eval_places();
const std::vector<std::string>& eval_goods();  // plural, countable

// `n` different words: plain ones in random order, then, where those do not suffice, compounds of two.
class EvalRandom;
std::vector<std::string> draw_words(EvalRandom& random, size_t n);
// Words that draw_words() can give.
size_t drawable_words();

}  // namespace longkv
