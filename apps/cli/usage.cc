#include "usage.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "base/edit_distance.h"

namespace longkv::cli {

namespace {

constexpr std::array<std::string_view, 9> kShort = {"-ctk", "-ctv", "-ub", "-fa", "-pg", "-sys", "-ngl", "-dev", "-np"};

// Texts that may be empty: what the user says to the model.
constexpr std::array<std::string_view, 2> kMayBeEmpty = {"--prompt", "--system-prompt"};

bool is_short(std::string_view name) { return std::find(kShort.begin(), kShort.end(), name) != kShort.end(); }

std::string name_of(const std::string& argument) { return argument.substr(0, argument.find('=')); }

bool takes_value(const CLI::Option& option) { return option.get_items_expected_min() > 0; }

// The candidate that the user most likely meant; empty when none is near. A word that begins or ends with a candidate's
// letters, or the other way round, counts as one edit: "--penalty" for "--repeat-penalty".
std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  const auto letters = [](std::string_view text) {
    return text.substr(std::min(text.find_first_not_of('-'), text.size()));
  };
  const std::string_view wanted = letters(word);
  std::string best;
  size_t best_distance = std::max<size_t>(wanted.size() / 3, 1) + 1;
  for (const std::string& candidate : candidates) {
    const std::string_view other = letters(candidate);
    size_t distance = edit_distance(wanted, other);
    const std::string_view part = wanted.size() < other.size() ? wanted : other;
    const std::string_view whole = wanted.size() < other.size() ? other : wanted;
    if (part.size() > 2 && (whole.starts_with(part) || whole.ends_with(part))) distance = 1;
    if (distance < best_distance) best = candidate, best_distance = distance;
  }
  return best;
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back(user_spelling("--" + name));
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

std::string describe_unknown_option(const CLI::App& app, const CLI::App& command, const std::string& argument) {
  const std::string name = user_spelling(name_of(argument));
  std::string text = fmt::format("'{}' is not an option of '{}'", name, command.get_name());
  const std::string near = nearest(name, option_names(command));
  std::string owners;
  for (const CLI::App* other : app.get_subcommands({})) {
    const std::vector<std::string> names = option_names(*other);
    if (std::find(names.begin(), names.end(), name) == names.end()) continue;
    owners += (owners.empty() ? "" : ", ") + other->get_name();
  }
  if (!owners.empty()) {
    text += fmt::format("; it belongs to {}", owners);
  } else if (!near.empty()) {
    text += fmt::format("; did you mean '{}'?", near);
  }
  return text;
}

// "-n5" and "-vq": letters of known options, the last with its value. Letters after an option that takes a value are
// rather a long name with one dash ("-ngl").
bool is_cluster(const CLI::App& command, const std::string& argument) {
  for (size_t i = 1; i < argument.size(); ++i) {
    const CLI::Option* option = command.get_option_no_throw(std::string("-") + argument[i]);
    if (option == nullptr) return false;
    if (takes_value(*option))
      return i + 1 < argument.size() && !std::isalpha(static_cast<unsigned char>(argument[i + 1]));
  }
  return true;
}

std::string whole_number(std::string& text) {
  int64_t value = 0;
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error == std::errc::result_out_of_range) return fmt::format("{} is out of range", text);
  if (error != std::errc() || stop != end) return fmt::format("'{}' is not a whole number", text);
  text = std::to_string(value);  // the library would read a leading zero as octal
  return "";
}

std::string real_number(std::string& text) {
  double value = 0;
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error == std::errc::result_out_of_range) return fmt::format("{} is out of range", text);
  if (error != std::errc() || stop != end || !std::isfinite(value)) return fmt::format("'{}' is not a number", text);
  return "";
}

std::string not_empty(std::string& text) { return text.empty() ? "the value is empty" : ""; }

}  // namespace

std::vector<std::string> library_spelling(const std::vector<std::string>& arguments) {
  std::vector<std::string> out;
  for (const std::string& argument : arguments) out.push_back(is_short(name_of(argument)) ? "-" + argument : argument);
  return out;
}

std::string plain_words(std::string message) {
  const size_t end = message.find(": ");
  if (end == std::string::npos) return message;
  const std::string name = user_spelling(message.substr(0, end)), rest = message.substr(end + 2);
  if (rest.starts_with("At Most 1 required")) return name + " is given more than once; give it once";
  if (rest.starts_with("1 required") && rest.ends_with("missing")) return name + ": the value is missing";
  return message;
}

std::string user_spelling(const std::string& option) {
  return option.starts_with("--") && is_short(option.substr(1)) ? option.substr(1) : option;
}

void check_values_strictly(CLI::App& app) {
  for (CLI::App* command : app.get_subcommands({})) {
    check_values_strictly(*command);
    for (CLI::Option* option : command->get_options()) {
      if (!takes_value(*option)) continue;
      const std::string type = option->get_type_name();
      const bool may_be_empty = std::any_of(kMayBeEmpty.begin(), kMayBeEmpty.end(), [&](std::string_view name) {
        return option->check_name(std::string(name));
      });
      if (type.starts_with("INT")) {
        option->transform(CLI::Validator(whole_number, ""));
      } else if (type.starts_with("FLOAT")) {
        option->transform(CLI::Validator(real_number, ""));
      } else if (!may_be_empty) {
        option->transform(CLI::Validator(not_empty, ""));
      }
    }
  }
}

std::string unknown_name(const CLI::App& app, const std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments.front().starts_with('-')) return "";
  const auto positional = [](const CLI::App& a) {
    const auto options = a.get_options();
    return std::count_if(options.begin(), options.end(), [](const CLI::Option* o) { return o->get_positional(); });
  };
  const CLI::App* command = nullptr;
  std::vector<std::string> commands;
  for (const CLI::App* c : app.get_subcommands({})) {
    commands.push_back(c->get_name());
    if (c->get_name() == arguments.front()) command = c;
  }
  if (command == nullptr) {
    const std::string near = nearest(arguments.front(), commands);
    return fmt::format("'{}' is not a command; {}", arguments.front(),
                       near.empty() ? fmt::format("commands are {}", fmt::join(commands, ", "))
                                    : fmt::format("did you mean '{}'?", near));
  }
  if (!command->get_subcommands({}).empty()) {
    return unknown_name(*command, {arguments.begin() + 1, arguments.end()});
  }
  auto places = positional(*command);
  for (size_t i = 1; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument.size() < 2 || argument[0] != '-') {
      if (places-- > 0) continue;
      return fmt::format("'{}' is not expected: every value of '{}' follows an option", argument, command->get_name());
    }
    if (const CLI::Option* option = command->get_option_no_throw(name_of(argument))) {
      if (takes_value(*option) && argument.find('=') == std::string::npos) ++i;
    } else if (argument.starts_with("--") || !is_cluster(*command, argument)) {
      return describe_unknown_option(app, *command, argument);
    } else {
      const CLI::Option* last = command->get_option_no_throw(std::string("-") + argument.back());
      if (last != nullptr && takes_value(*last)) ++i;
    }
  }
  return "";
}

}  // namespace longkv::cli
