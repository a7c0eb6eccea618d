// The command line before and after the option library: spelling of flags, values that it would bend, its messages.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace longkv::cli {

// llama.cpp's short flags of several letters ("-ctk") as the option library spells them ("--ctk"). The arguments come
// without the program's name and in order.
std::vector<std::string> library_spelling(const std::vector<std::string>& arguments);

// Makes every option of every command refuse values that the library would silently change or drop: whole numbers out
// of range, octal and hexadecimal, and empty words. Call after the commands were added.
void check_values_strictly(CLI::App& app);

// What is wrong with the names in `arguments` (library spelling), with the nearest name that exists; empty when every
// name is known.
std::string unknown_name(const CLI::App& app, const std::vector<std::string>& arguments);

// A message of the option library about an option that came twice or without its value, in words.
std::string plain_words(std::string message);

// "--ctk" as the user types it: "-ctk".
std::string user_spelling(const std::string& option);

}  // namespace longkv::cli
