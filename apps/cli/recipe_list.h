// Lists of KV recipes as users type them.
#pragma once

#include <string>
#include <vector>

namespace longkv::cli {

// "full,quest:block=16,budget=1024,index=bits(block=16)+select=topk": a comma starts a new recipe unless a key=value
// pair follows or parentheses are open.
std::vector<std::string> split_recipes(const std::string& text);

}  // namespace longkv::cli
