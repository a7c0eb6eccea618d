// Rows that NVIDIA's kvpress keeps (tests/golden/kvpress/, written by tests/golden/make_kvpress_goldens.py).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace longkv::test {

struct KvpressHead {
  std::vector<bool> kept;     // [units]: positions, or channels in the order of transformers (rotary halves)
  std::vector<int32_t> near;  // units that another float32 evaluation may decide otherwise, ascending
  float worst_kept = 0;       // scores, as the press computes them
  float best_dropped = 0;
  float noise = 0;  // float32 against float64: of log scores, of plain ones for keydiff and knorm; NaN if not known
};

// One method at one ratio in one prompt.
struct KvpressCut {
  double ratio = 0;                             // share removed
  std::vector<std::vector<KvpressHead>> heads;  // [KvpressCase::layers][kv head]
};

enum class KvpressShare { kHead, kLayer, kModel };  // who competes for the rows that are kept

struct KvpressRecord {
  std::string name;           // method and variant: "snapkv", "snapkv_w32_k7"
  std::string press;          // class of the package
  nlohmann::json parameters;  // all settings of the press but the ratio
  KvpressShare share = KvpressShare::kHead;
  bool channels = false;                         // think: units are channels
  std::vector<std::vector<int32_t>> repeat_ids;  // kvzip: what is read again, one list per chunk
  std::vector<KvpressCut> cuts;
};

struct KvpressCase {
  std::string name;
  std::vector<int32_t> ids;
  std::vector<int> layers;  // those recorded
  bool all_layers = false;
  std::vector<KvpressRecord> records;

  const KvpressRecord& find(const std::string& record_name) const;
};

struct KvpressGolden {
  std::string model;  // file name, of tests/golden/models or a fetched model
  int layers = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  std::vector<KvpressCase> cases;
};

// Throws std::runtime_error when the recording is missing or contradicts itself.
KvpressGolden load_kvpress(const std::string& name);

// How a list differs from a recording. Equal up to near-ties: `wrong` is empty.
struct KvpressDifference {
  std::string wrong;  // the first contradiction in words
  int64_t compared = 0;
  int64_t ties = 0;  // units decided otherwise among the near ones
};
// `found`: [KvpressCase::layers][kv head], the units kept, ascending. A unit that is not near must be kept exactly if
// the recording keeps it, and whoever competes for the same rows must keep as many in all.
KvpressDifference compare_kept(const KvpressCase& c, const KvpressRecord& record, const KvpressCut& cut,
                               const std::vector<std::vector<std::vector<int64_t>>>& found);

}  // namespace longkv::test
