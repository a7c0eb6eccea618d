#include "recipe_list.h"

#include "kv/recipe/stage.h"

namespace longkv::cli {

std::vector<std::string> split_recipes(const std::string& text) {
  std::vector<std::string> recipes;
  std::string piece;
  int depth = 0;
  auto flush = [&] {
    const size_t equals = piece.find('='), other = piece.find_first_of(":(+ ");
    // A stage written out (index=bits(block=16)+...) begins a recipe; store=q8_0 may be a preset's parameter.
    const bool written_out = find_stage(piece.substr(0, equals)) != nullptr && other != std::string::npos;
    const bool continues = !recipes.empty() && equals != std::string::npos &&
                           (other == std::string::npos || equals < other) && !written_out;
    if (continues) {
      recipes.back() += "," + piece;
    } else {
      recipes.push_back(piece);
    }
    piece.clear();
  };
  for (char c : text) {
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (c == ',' && depth == 0) {
      flush();
    } else {
      piece += c;
    }
  }
  flush();
  return recipes;
}

}  // namespace longkv::cli
