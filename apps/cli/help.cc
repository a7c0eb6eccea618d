#include "help.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace longkv::cli {

namespace {

class ScreenFormatter : public CLI::Formatter {
 public:
  ScreenFormatter() { column_width(36); }

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    all_ = mode == CLI::AppFormatMode::All;
    return Formatter::make_help(app, std::move(name), mode);
  }

  std::string make_group(std::string group, bool positional, std::vector<const CLI::Option*> options) const override {
    return group == kMore && !all_ ? "" : Formatter::make_group(std::move(group), positional, std::move(options));
  }

  std::string make_footer(const CLI::App* app) const override {
    const auto more = app->get_options([](const CLI::Option* o) { return o->get_group() == kMore; });
    if (all_) return "";
    if (more.empty()) return app->get_parent() == nullptr ? "\n'longkv COMMAND --help' describes a command.\n" : "";
    return "\n'longkv " + app->get_name() + " --help-all' lists all options.\n";
  }

 private:
  mutable bool all_ = false;  // the library asks for groups without saying in which mode
};

}  // namespace

void set_up_help(CLI::App& app) {
  app.formatter(std::make_shared<ScreenFormatter>());
  app.set_help_flag("-h,--help", "Print help and exit");
  app.set_help_all_flag("--help-all", "Print help with every option and exit");
}

}  // namespace longkv::cli
