// What a recipe lets another prompt take over from a stored state.
#pragma once

#include <cstdint>

#include "kv/recipe.h"

namespace longkv {

// A state is worth the same bits as reading its tokens anew only as far as it does not depend on what followed them.
struct PrefixReuse {
  // The state can be cut to any of its leading tokens. False for recipes that evict, merge or encode at a prompt's end,
  // or read prompts sparsely: there only a whole state is of use, and what follows goes on from it like a next turn.
  bool any_length = false;
  // Its rows can be taken over but its index cannot, because that was made of a whole prompt: it is made of rows again.
  bool rebuild = false;
  // Last tokens of the new prompt that must be read, whatever is stored: their queries decide something.
  int64_t unread = 1;
};

PrefixReuse prefix_reuse(const Recipe& recipe);

}  // namespace longkv
