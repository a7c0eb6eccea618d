#include "kv/recipe/yaml_reader.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <fstream>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/inputs.h"

namespace longkv {

namespace {

std::string place(const YAML::Mark& mark) {
  if (mark.is_null()) return "somewhere in the file";
  return fmt::format("line {}, column {}", mark.line + 1, mark.column + 1);
}

// yaml-cpp calls this while it parses; a refusal is thrown through its frames and caught in read_yaml.
struct Refused {
  Status status;
};

class Collector : public YAML::EventHandler {
 public:
  std::vector<YamlNode> nodes;

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { add(YamlNode::Kind::kNull, mark, "", anchor); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { refuse(mark, "an alias (*name)"); }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    // "?" and "!" are what yaml-cpp reports for plain and for quoted scalars without a tag.
    if (!tag.empty() && tag != "?" && tag != "!") refuse(mark, "a tag (!name)");
    const bool null = tag != "!" && (value.empty() || value == "~" || value == "null" || value == "Null");
    add(null ? YamlNode::Kind::kNull : YamlNode::Kind::kScalar, mark, value, anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(YamlNode::Kind::kSequence, mark, tag, anchor);
  }
  void OnSequenceEnd() override { open_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(YamlNode::Kind::kMap, mark, tag, anchor);
  }
  void OnMapEnd() override { open_.pop_back(); }

 private:
  [[noreturn]] void refuse(const YAML::Mark& mark, const char* what) {
    throw Refused{fail(Code::kInvalidArgument, "{}: {} is not allowed in a settings file", place(mark), what)};
  }

  size_t add(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& text, YAML::anchor_t anchor) {
    if (anchor != 0) refuse(mark, "an anchor (&name)");
    if (nodes.size() == kMaxYamlNodes) {
      throw Refused{
          fail(Code::kInvalidArgument, "{}: more than {} values in a settings file", place(mark), kMaxYamlNodes)};
    }
    const size_t id = nodes.size();
    nodes.push_back({kind, text, place(mark), {}});
    if (!open_.empty()) nodes[open_.back()].children.push_back(id);
    return id;
  }

  void open(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (!tag.empty() && tag != "?" && tag != "!") refuse(mark, "a tag (!name)");
    if (open_.size() == size_t(kMaxYamlDepth)) {
      throw Refused{
          fail(Code::kInvalidArgument, "{}: values lie more than {} levels deep", place(mark), kMaxYamlDepth)};
    }
    open_.push_back(add(kind, mark, "", anchor));
  }

  std::vector<size_t> open_;
};

Status check_keys(const std::vector<YamlNode>& nodes) {
  for (const YamlNode& node : nodes) {
    if (node.kind != YamlNode::Kind::kMap) continue;
    std::set<std::string> seen;
    for (size_t i = 0; i + 1 < node.children.size(); i += 2) {
      const YamlNode& key = nodes[node.children[i]];
      if (key.kind != YamlNode::Kind::kScalar) {
        return fail(Code::kInvalidArgument, "{}: a key must be a word", key.where);
      }
      if (!seen.insert(key.text).second) {
        return fail(Code::kInvalidArgument, "{}: the key '{}' is given twice", key.where, key.text.substr(0, 64));
      }
    }
  }
  return {};
}

}  // namespace

Result<YamlDocument> read_yaml(std::string_view text) {
  if (text.size() > kMaxYamlBytes) {
    return fail(Code::kInvalidArgument, "a settings file of {} bytes is too long; at most {}", text.size(),
                kMaxYamlBytes);
  }
  Collector collector;
  try {
    std::istringstream in{std::string(text)};
    YAML::Parser parser(in);
    parser.HandleNextDocument(collector);
    const size_t first_document = collector.nodes.size();
    if (first_document > 0 && parser.HandleNextDocument(collector) && collector.nodes.size() > first_document &&
        collector.nodes.back().kind != YamlNode::Kind::kNull) {
      return fail(Code::kInvalidArgument, "{}: a second document in a settings file",
                  collector.nodes[first_document].where);
    }
    collector.nodes.resize(first_document);
  } catch (const Refused& refused) {
    return refused.status;
  } catch (const YAML::Exception& error) {
    return fail(Code::kInvalidArgument, "{}: not YAML: {}", place(error.mark), error.msg);
  } catch (const std::exception& error) {
    return fail(Code::kInvalidArgument, "not YAML: {}", error.what());
  }
  if (collector.nodes.empty() || collector.nodes[0].kind != YamlNode::Kind::kMap) {
    return fail(Code::kInvalidArgument, "line 1, column 1: a settings file is a map of keys and values");
  }
  LONGKV_TRY(check_keys(collector.nodes));
  return YamlDocument{std::move(collector.nodes)};
}

Result<std::string> read_settings_file(const std::string& path) {
  LONGKV_TRY(check_readable(path));
  std::ifstream in(path, std::ios::binary);
  std::string text(kMaxYamlBytes + 1, '\0');
  in.read(text.data(), std::streamsize(text.size()));
  if (in.bad() || (in.gcount() == 0 && !in.eof())) return fail(Code::kIo, "cannot read '{}'", path);
  text.resize(size_t(in.gcount()));
  if (text.size() > kMaxYamlBytes) {
    return fail(Code::kInvalidArgument, "'{}' is larger than {} bytes, the most of a settings file", path,
                kMaxYamlBytes);
  }
  return text;
}

}  // namespace longkv
