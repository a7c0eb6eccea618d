#include "support/kvpress_recipe.h"

#include <fmt/format.h>

namespace longkv::test {

namespace {

std::string snapkv_fields(const nlohmann::json& p) {
  return fmt::format("window={},kernel={},pool=avg", p.at("window_size").get<int>(), p.at("kernel_size").get<int>());
}

std::string expected_fields(const nlohmann::json& p) {
  return fmt::format("sink={},future={},covariance={},value_norm={},epsilon={}", p.at("n_sink").get<int>(),
                     p.at("n_future_positions").get<int>(), p.at("use_covariance").get<bool>(),
                     p.at("use_vnorm").get<bool>(), p.at("epsilon").get<double>());
}

}  // namespace

std::string kvpress_keep(const KvpressRecord& record, const KvpressCut& cut, int64_t n) {
  const nlohmann::json& p = record.parameters;
  const auto kept = int64_t(double(n) * (1 - cut.ratio));
  // Below the window a press keeps an arbitrary part of it.
  const auto below_window = [&](const nlohmann::json& s) { return kept <= s.at("window_size").get<int64_t>(); };
  if (record.press == "StreamingLLMPress") {
    const int sink = p.at("n_sink").get<int>();
    return kept <= sink ? "" : fmt::format("keep=streaming(sink={},window={})", sink, kept - sink);
  }
  if (record.press == "TOVAPress") return fmt::format("keep=tova(budget={},sink=0)", kept);
  if (record.press == "SnapKVPress") {
    return below_window(p) ? "" : fmt::format("keep=snapkv(budget={},{})", kept, snapkv_fields(p));
  }
  if (record.press == "PyramidKVPress") {
    if (below_window(p)) return "";
    return fmt::format("keep=pyramidkv(keep_ratio={},{},beta={},window_inside=true)", 1 - cut.ratio, snapkv_fields(p),
                       p.at("beta").get<int>());
  }
  if (record.press == "ObservedAttentionPress") {
    return fmt::format("keep=h2o(budget={},recent=0,normalise=visible)", kept);
  }
  if (record.press == "ExpectedAttentionPress") {
    return fmt::format("keep=expected_attention(budget={},{})", kept, expected_fields(p));
  }
  if (record.press == "KeyDiffPress") return fmt::format("keep=keydiff(budget={})", kept);
  if (record.press == "KnormPress") return fmt::format("keep=knorm(budget={})", kept);
  if (record.press == "AdaKVPress") {
    const nlohmann::json& scorer = p.at("press");
    const auto shared = fmt::format("budget={},mode=min,safeguard={}", kept, p.at("alpha_safeguard").get<double>());
    if (scorer.at("class") == "SnapKVPress") {
      return below_window(scorer) ? "" : fmt::format("keep=adakv(scorer=snapkv,{},{})", shared, snapkv_fields(scorer));
    }
    return fmt::format("keep=adakv(scorer=expected,{},window=0,{})", shared, expected_fields(scorer));
  }
  if (record.press == "KVzipPress" && !p.at("kvzip_plus_normalization").get<bool>()) {
    return fmt::format("keep=kvzip(keep_ratio={},sink={},chunk={},layerwise={})", 1 - cut.ratio,
                       p.at("n_sink").get<int>(), p.at("chunk_size").get<int>(), p.at("layerwise").get<bool>());
  }
  return "";
}

}  // namespace longkv::test
