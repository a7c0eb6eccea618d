#include "prefill/attention.h"

#include <algorithm>
#include <vector>

#include "base/aligned.h"
#include "base/checked.h"
#include "prefill/attention_tile.h"

namespace longkv {

namespace {

// Query rows that share one packing of a key tile. Decoding and packing a key costs about as much as eight of them.
constexpr int64_t kTargetRows = 288;
// Items per thread below which query tiles are made smaller. The bits of the result do not depend on the tiles.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kMinTokens = 16;

// Hands out 64-byte aligned pieces of one allocation; without one (null) it only counts.
class Carver {
 public:
  explicit Carver(float* base) : base_(base) {}
  float* take(int64_t n) {
    float* p = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(n, 16);
    return p;
  }
  int64_t used() const { return used_; }  // floats

 private:
  float* base_;
  int64_t used_ = 0;
};

int64_t tokens_per_tile(int64_t tokens, int64_t kv_heads, int64_t group, int64_t threads) {
  int64_t per_tile = std::max<int64_t>(1, kTargetRows / group);
  const int64_t wanted = ceil_div(kItemsPerThread * threads, kv_heads);
  per_tile = std::min(per_tile, std::max(ceil_div(tokens, wanted), kMinTokens));
  return std::min(per_tile, tokens);
}

}  // namespace

struct PrefillAttention::Scratch {
  struct Shape {
    int64_t dim_k = 0, dim_v = 0, rows = 0, group = 0;
    bool operator==(const Shape&) const = default;
  };

  // Largest shape so far; buffers only grow, so that a run of equal chunks allocates once.
  Shape shape;
  std::vector<AlignedFloats> memory;  // [workers]
  std::vector<TileScratch> workers;
  std::vector<float> row_max, row_sum;  // [kv head][token >= mass_from][group]

  static TileScratch carve(const Shape& s, Carver& carver) {
    const int64_t key_tile = kMaxKeyTile;
    const int64_t dim_v = round_up(s.dim_v, kMaxPanel);
    TileScratch t;
    t.q = carver.take(s.rows * s.dim_k);
    t.acc = carver.take(s.rows * dim_v);
    t.max = carver.take(s.rows);
    t.sum = carver.take(s.rows);
    t.k = carver.take(key_tile * s.dim_k);
    t.v = carver.take(key_tile * dim_v);
    t.s = carver.take(kScoreRows * (key_tile + 16));
    t.decoded = carver.take(kMaxPanel * std::max(s.dim_k, dim_v));
    t.mass = carver.take(key_tile * s.group);
    t.bias = carver.take(key_tile);
    return t;
  }

  void reserve(const Shape& wanted) {
    const Shape s{std::max(shape.dim_k, wanted.dim_k), std::max(shape.dim_v, wanted.dim_v),
                  std::max(shape.rows, wanted.rows), std::max(shape.group, wanted.group)};
    if (s == shape) return;
    shape = s;
    Carver sizes(nullptr);
    carve(s, sizes);
    for (size_t w = 0; w < workers.size(); ++w) {
      memory[w].reset();
      memory[w] = aligned_floats(size_t(sizes.used()));
      Carver carver(memory[w].get());
      workers[w] = carve(s, carver);
    }
  }
};

PrefillAttention::PrefillAttention(ThreadPool& pool) : pool_(pool), scratch_(std::make_unique<Scratch>()) {
  scratch_->memory.resize(size_t(pool.threads()));
  scratch_->workers.resize(size_t(pool.threads()));
}

PrefillAttention::~PrefillAttention() = default;

void PrefillAttention::run(const PrefillAttendArgs& args) {
  if (args.tokens <= 0 || args.heads.empty()) return;
  const int64_t kv_heads = int64_t(args.heads.size());
  const int64_t group = args.group_size;
  const int64_t dim_k = args.heads[0].dim_k;
  const int64_t dim_v = args.heads[0].dim_v;
  const int64_t per_tile = tokens_per_tile(args.tokens, kv_heads, group, pool_.threads());
  const int64_t max_rows = round_up(per_tile * group, kScoreRows);
  scratch_->reserve({dim_k, dim_v, max_rows, group});

  const int64_t mass_first =
      args.mass == nullptr ? args.tokens : std::max<int64_t>(0, args.mass_from - args.first_position);
  const int64_t mass_tokens = std::max<int64_t>(0, args.tokens - mass_first);
  scratch_->row_max.resize(size_t(kv_heads * mass_tokens * group));
  scratch_->row_sum.resize(scratch_->row_max.size());

  // Tokens [from, from + n) of a KV head.
  const auto tile_of = [&](int64_t head, int64_t from, int64_t n) {
    QueryTile tile;
    tile.kv = &args.heads[size_t(head)];
    tile.q = args.q + from * kv_heads * group * dim_k + head * group * dim_k;
    tile.q_stride = kv_heads * group * dim_k;
    tile.tokens = n;
    tile.group = int(group);
    tile.position = args.first_row(head) + from;
    tile.window = args.window;
    tile.params = args.params;
    tile.cancel = args.cancel;
    if (from >= mass_first) {
      const int64_t row = (head * mass_tokens + from - mass_first) * group;
      tile.row_max = scratch_->row_max.data() + row;
      tile.row_sum = scratch_->row_sum.data() + row;
    }
    return tile;
  };

  // Tiles never straddle mass_first. The last tokens see most keys: they go first, so that no long item ends alone.
  const int64_t plain_tiles = ceil_div(std::min(mass_first, args.tokens), per_tile);
  const int64_t tiles = plain_tiles + ceil_div(mass_tokens, per_tile);
  pool_.run(tiles * kv_heads, [&](int64_t task, int worker) {
    const int64_t t = tiles - 1 - task / kv_heads;
    const int64_t head = task % kv_heads;
    const bool plain = t < plain_tiles;
    const int64_t from = plain ? t * per_tile : mass_first + (t - plain_tiles) * per_tile;
    const int64_t to = std::min(from + per_tile, plain ? std::min(mass_first, args.tokens) : args.tokens);
    const QueryTile tile = tile_of(head, from, to - from);
    float* out = args.out + from * kv_heads * group * dim_v + head * group * dim_v;
    attend_query_tile(tile, scratch_->workers[size_t(worker)], out, kv_heads * group * dim_v);
  });

  if (mass_tokens == 0) return;
  const int64_t key_tile = prefill_key_tile(dim_k, dim_v);
  int64_t first_key = 0;
  if (args.window > 0) first_key = std::max<int64_t>(0, args.first_position + mass_first - args.window + 1) / key_tile;
  int64_t end_row = 0;
  for (int64_t h = 0; h < kv_heads; ++h) end_row = std::max(end_row, args.first_row(h) + args.tokens);
  const int64_t key_tiles = ceil_div(end_row, key_tile) - first_key;
  pool_.run(key_tiles * kv_heads, [&](int64_t task, int worker) {
    if (args.cancel != nullptr && args.cancel->load(std::memory_order_relaxed)) return;
    const int64_t head = task % kv_heads;
    const int64_t key = (first_key + task / kv_heads) * key_tile;
    mass_of_key_tile(tile_of(head, mass_first, mass_tokens), key, max_rows, scratch_->workers[size_t(worker)],
                     args.mass + head * group * args.mass_stride, args.mass_stride);
  });
}

int64_t dense_pairs(const PrefillAttendArgs& args) {
  int64_t pairs = 0;
  for (int64_t h = 0; h < int64_t(args.heads.size()); ++h) {
    const int64_t first = args.first_row(h), held = args.heads[size_t(h)].first_row;
    if (args.window == 0) {
      pairs += causal_pairs(held, {first, first + args.tokens});
    } else {
      for (int64_t row = first; row < first + args.tokens; ++row) {
        pairs += row + 1 - std::max(held, first_visible_row(row, args.window));
      }
    }
  }
  return pairs * args.group_size;
}

PrefillPairs PrefillAttention::run_listed(const PrefillAttendArgs& args, const RowLists& lists) {
  if (args.tokens <= 0 || args.heads.empty()) return {};
  const int64_t kv_heads = int64_t(args.heads.size());
  const int64_t group = args.group_size;
  const int64_t dim_k = args.heads[0].dim_k;
  const int64_t dim_v = args.heads[0].dim_v;
  const int64_t block = lists.block_rows();
  const int64_t per_list = lists.heads_per_list();
  scratch_->reserve({dim_k, dim_v, round_up(std::min(block, args.tokens) * per_list, kScoreRows), group});

  struct Worker {
    std::vector<RowRange> rows;
    PrefillPairs pairs;
  };
  std::vector<Worker> workers(size_t(pool_.threads()));
  const int64_t units = kv_heads * group / per_list;
  const int64_t blocks = ceil_div(args.tokens, block) + 1;  // a chunk may begin inside a block
  pool_.run(blocks * units, [&](int64_t task, int worker) {
    const int64_t query_head = task % units * per_list;
    const int64_t head = query_head / group;
    const int64_t first = args.first_row(head);
    const int64_t at = (first / block + blocks - 1 - task / units) * block;
    const RowRange queries{std::max(at, first), std::min(at + block, first + args.tokens)};
    if (queries.begin >= queries.end) return;
    Worker& w = workers[size_t(worker)];
    lists.rows(int(query_head), queries, w.rows);
    w.pairs.attended += per_list * causal_pairs(w.rows, queries);
    w.pairs.causal += per_list * causal_pairs(args.heads[size_t(head)].first_row, queries);

    const int64_t from = queries.begin - first;
    QueryTile tile;
    tile.kv = &args.heads[size_t(head)];
    tile.q = args.q + (from * kv_heads * group + query_head) * dim_k;
    tile.q_stride = kv_heads * group * dim_k;
    tile.tokens = count_of(queries);
    tile.group = int(per_list);
    tile.position = queries.begin;
    tile.listed = w.rows;
    tile.params = args.params;
    tile.cancel = args.cancel;
    float* out = args.out + (from * kv_heads * group + query_head) * dim_v;
    attend_query_tile(tile, scratch_->workers[size_t(worker)], out, kv_heads * group * dim_v);
  });
  PrefillPairs pairs;
  for (const Worker& w : workers) {
    pairs.attended += w.pairs.attended;
    pairs.causal += w.pairs.causal;
  }
  return pairs;
}

}  // namespace longkv
