#include "support/kvpress_golden.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "support/paths.h"

namespace longkv::test {

namespace {

class Bytes {
 public:
  explicit Bytes(const std::string& path) : path_(path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error("cannot open " + path);
    data_.assign(std::istreambuf_iterator<char>(in), {});
  }
  void seek(size_t at) { at_ = at; }
  bool at_end() const { return at_ == data_.size(); }
  template <class T>
  T read() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  const char* take(size_t n) {
    if (n > data_.size() - at_) throw std::runtime_error(path_ + " is shorter than its description");
    at_ += n;
    return data_.data() + at_ - n;
  }

 private:
  std::string path_;
  std::vector<char> data_;
  size_t at_ = 0;
};

KvpressHead read_head(Bytes& in, size_t units) {
  KvpressHead head;
  const char* bits = in.take((units + 7) / 8);
  for (size_t i = 0; i < units; ++i) head.kept.push_back((bits[i / 8] >> (i % 8) & 1) != 0);
  head.worst_kept = in.read<float>();
  head.best_dropped = in.read<float>();
  head.noise = in.read<float>();
  head.near.resize(in.read<uint16_t>());
  for (int32_t& unit : head.near) unit = in.read<uint16_t>();
  return head;
}

KvpressShare share_of(const std::string& word) {
  if (word == "head") return KvpressShare::kHead;
  if (word == "layer") return KvpressShare::kLayer;
  if (word == "model") return KvpressShare::kModel;
  throw std::runtime_error("unknown kind of cut: " + word);
}

}  // namespace

const KvpressRecord& KvpressCase::find(const std::string& record_name) const {
  for (const KvpressRecord& r : records) {
    if (r.name == record_name) return r;
  }
  throw std::runtime_error("case " + name + " has no record " + record_name);
}

KvpressGolden load_kvpress(const std::string& name) {
  const std::string stem = golden("kvpress/" + name);
  std::ifstream in(stem + ".json");
  if (!in) throw std::runtime_error("cannot open " + stem + ".json");
  const nlohmann::json json = nlohmann::json::parse(in);
  Bytes blob(stem + ".bin");
  KvpressGolden out;
  out.model = json.at("model");
  out.layers = json.at("layers");
  out.query_heads = json.at("query_heads");
  out.kv_heads = json.at("kv_heads");
  out.head_dim = json.at("head_dim");
  for (const auto& j : json.at("cases")) {
    KvpressCase c;
    c.name = j.at("name");
    j.at("ids").get_to(c.ids);
    j.at("layers").get_to(c.layers);
    c.all_layers = int(c.layers.size()) == out.layers;
    for (const auto& r : j.at("records")) {
      KvpressRecord record;
      record.name = r.at("name");
      record.press = r.at("press");
      record.parameters = r.at("parameters");
      record.share = share_of(r.at("cut"));
      record.channels = r.at("units") == "channels";
      if (r.contains("repeat_ids")) r.at("repeat_ids").get_to(record.repeat_ids);
      const size_t units = record.channels ? size_t(out.head_dim) : c.ids.size();
      for (size_t i = 0; i < r.at("ratios").size(); ++i) {
        KvpressCut cut;
        cut.ratio = r.at("ratios")[i];
        blob.seek(r.at("offsets").at(i));
        for (size_t l = 0; l < c.layers.size(); ++l) {
          auto& heads = cut.heads.emplace_back();
          for (int h = 0; h < out.kv_heads; ++h) heads.push_back(read_head(blob, units));
        }
        record.cuts.push_back(std::move(cut));
      }
      c.records.push_back(std::move(record));
    }
    out.cases.push_back(std::move(c));
  }
  if (!blob.at_end()) throw std::runtime_error(stem + ".bin is longer than its description");
  return out;
}

KvpressDifference compare_kept(const KvpressCase& c, const KvpressRecord& record, const KvpressCut& cut,
                               const std::vector<std::vector<std::vector<int64_t>>>& found) {
  KvpressDifference out;
  const std::string what = record.name + " without " + std::to_string(cut.ratio).substr(0, 4) + " of " + c.name;
  const auto blame = [&](const std::string& text) {
    if (out.wrong.empty()) out.wrong = what + ": " + text;
  };
  if (found.size() != cut.heads.size()) {
    blame(std::to_string(found.size()) + " layers instead of " + std::to_string(cut.heads.size()));
    return out;
  }
  int64_t all_want = 0, all_have = 0;
  for (size_t l = 0; l < found.size(); ++l) {
    const std::string layer = "layer " + std::to_string(c.layers[l]);
    if (found[l].size() != cut.heads[l].size()) {
      blame(layer + " has " + std::to_string(found[l].size()) + " KV heads");
      return out;
    }
    int64_t layer_want = 0, layer_have = 0;
    for (size_t h = 0; h < found[l].size(); ++h) {
      const KvpressHead& head = cut.heads[l][h];
      const std::string where = layer + " KV head " + std::to_string(h);
      std::vector<bool> have(head.kept.size(), false);
      int64_t last = -1;
      for (const int64_t unit : found[l][h]) {
        if (unit <= last || unit >= int64_t(have.size())) {
          blame(where + ": " + std::to_string(unit) + " after " + std::to_string(last) +
                " is not ascending or not there");
          return out;
        }
        have[size_t(unit)] = true;
        last = unit;
      }
      for (size_t i = 0; i < have.size(); ++i) {
        ++out.compared;
        if (have[i] == head.kept[i]) continue;
        ++out.ties;
        if (!std::binary_search(head.near.begin(), head.near.end(), int32_t(i))) {
          blame(where + ": " + std::to_string(i) + (have[i] ? " is kept" : " is dropped") + " (scores at the cut " +
                std::to_string(head.worst_kept) + " over " + std::to_string(head.best_dropped) + ")");
        }
      }
      const int64_t want = std::count(head.kept.begin(), head.kept.end(), true);
      const auto size = int64_t(found[l][h].size());
      if (record.share == KvpressShare::kHead && size != want) {
        blame(where + " keeps " + std::to_string(size) + " instead of " + std::to_string(want));
      }
      layer_want += want;
      layer_have += size;
    }
    if (record.share == KvpressShare::kLayer && layer_have != layer_want) {
      blame(layer + " keeps " + std::to_string(layer_have) + " instead of " + std::to_string(layer_want));
    }
    all_want += layer_want;
    all_have += layer_have;
  }
  if (record.share == KvpressShare::kModel && c.all_layers && all_have != all_want) {
    blame("keeps " + std::to_string(all_have) + " instead of " + std::to_string(all_want));
  }
  return out;
}

}  // namespace longkv::test
