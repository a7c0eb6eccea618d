#include "help.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "output.h"
#include "usage.h"

namespace longkv::cli {

namespace {

constexpr size_t kNames = 29;  // columns of names and values; descriptions take the rest of 80
constexpr size_t kWidth = 78;  // of 80: the long help indents commands by two

// Line breaks in place of blanks, so that no line is longer than the description's column.
std::string wrapped(const std::string& text) {
  std::istringstream words(text);
  std::string out;
  size_t column = 0;
  for (std::string word; words >> word;) {
    if (column > 0 && column + 1 + word.size() > kWidth - kNames) {
      out += "\n";
      column = 0;
    }
    if (column > 0) out += " ", ++column;
    out += word;
    column += word.size();
  }
  return out;
}

class ScreenFormatter : public CLI::Formatter {
 public:
  ScreenFormatter() { column_width(kNames); }

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    all_ = mode == CLI::AppFormatMode::All;
    return Formatter::make_help(app, std::move(name), mode);
  }

  std::string make_description(const CLI::App* app) const override { return app->get_description() + "\n"; }

  std::string make_group(std::string group, bool positional, std::vector<const CLI::Option*> options) const override {
    return group == kMore && !all_ ? "" : Formatter::make_group(std::move(group), positional, std::move(options));
  }

  // "-c, --ctx-size"; every other spelling only in the long help.
  std::string make_option_name(const CLI::Option* option, bool /*positional*/) const override {
    std::vector<std::string> names, longer;
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) {
      const std::string text = user_spelling("--" + name);
      (text.starts_with("--") ? longer : names).push_back(text);
    }
    if (!all_ && longer.size() > 1) longer.resize(1);
    names.insert(names.end(), longer.begin(), longer.end());
    return fmt::format("{}", fmt::join(names, ", "));
  }

  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_items_expected_min() == 0) return "";
    const std::string type = option->get_type_name();
    std::string text = type.starts_with("INT") ? " N" : type.starts_with("FLOAT") ? " X" : " " + type;
    text.resize(std::min(text.size(), text.find(':')));  // the library adds what is allowed
    if (!option->get_default_str().empty()) text += "=" + option->get_default_str();
    return text;
  }

  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(option->get_description() + (option->get_required() ? " (required)" : ""));
  }

  std::string make_subcommand(const CLI::App* sub) const override {
    std::stringstream out;
    CLI::detail::format_help(out, sub->get_display_name(true), wrapped(sub->get_description()), kNames);
    return out.str();
  }

  std::string make_footer(const CLI::App* app) const override {
    if (all_) return "";
    if (app->get_parent() == nullptr) {
      return "'longkv COMMAND --help' describes a command.\n"
             "Exit codes: 0 good, 1 the run failed, 2 wrong usage, 130 ended by Ctrl-C.\n";
    }
    const auto more = app->get_options([](const CLI::Option* o) { return o->get_group() == kMore; });
    return more.empty() ? "" : "'longkv " + app->get_name() + " --help-all' lists all options.\n";
  }

 private:
  mutable bool all_ = false;  // the library asks for groups without saying in which mode
};

// The library leaves empty lines where a group is not shown.
std::string without_blank_runs(std::string text) {
  for (size_t at = 0; (at = text.find("\n\n\n", at)) != std::string::npos;) text.erase(at, 1);
  while (text.ends_with("\n\n")) text.pop_back();
  return text;
}

}  // namespace

void set_up_help(CLI::App& app) {
  app.formatter(std::make_shared<ScreenFormatter>());
  app.set_help_flag("-h,--help", "Print help and exit");
  app.set_help_all_flag("--help-all", "Print help with every option and exit");
}

Status print_help(const CLI::App& app, const CLI::Error& request) {
  std::ostringstream out;
  app.exit(request, out, out);
  return print(without_blank_runs(out.str()));
}

}  // namespace longkv::cli
