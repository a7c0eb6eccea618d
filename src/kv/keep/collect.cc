#include "kv/keep/collect.h"

#include <algorithm>

#include "base/checked.h"
#include "base/gemm.h"

namespace longkv {

namespace {

// Outer products of so many queries are summed in fp32 before they join a prompt's sum in double.
constexpr int64_t kQueriesAtOnce = 64;

}  // namespace

KeepCollector::KeepCollector(const KvShape& shape, const KeepNeeds& needs)
    : shape_(shape), needs_(needs), states_(size_t(shape.layers)) {}

void KeepCollector::begin(State& state, int64_t start) {
  state.start = start;
  if (needs_.statistics_from >= 0) {
    const int64_t d = shape_.dim_k;
    state.statistics.n = 0;
    state.statistics.sum.assign(size_t(query_heads() * d), 0.0);
    state.statistics.product.assign(size_t(query_heads() * d * d), 0.0);
  }
}

void KeepCollector::before_chunk(int layer, int64_t rows, int64_t prompt_end, PrefillAttendArgs& args) {
  State& state = states_[size_t(layer)];
  if (state.start < 0) begin(state, args.first_position);
  if (needs_.mass_queries == 0) return;
  const int64_t from = needs_.mass_queries == KeepNeeds::kAll ? 0 : prompt_end - needs_.mass_queries;
  if (args.first_position + args.tokens <= from) return;
  if (state.mass.empty()) {
    if (!free_mass_.empty()) {
      state.mass = std::move(free_mass_.back());
      free_mass_.pop_back();
    }
    // Rows that the layer will have at the prompt's end.
    state.mass_stride = rows + prompt_end - (args.first_position + args.tokens);
    state.mass.assign(size_t(state.mass_stride * query_heads()), 0.0f);
    state.mass_queries = prompt_end - std::max({from, state.start, int64_t{0}});
  }
  args.mass = state.mass.data();
  args.mass_stride = state.mass_stride;
  args.mass_from = std::max<int64_t>(0, from);
}

void KeepCollector::take_query(State& state, const PrefillAttendArgs& args, int64_t token) {
  const int64_t q_size = query_heads() * shape_.dim_k, out_size = query_heads() * shape_.dim_v;
  state.queries.positions.push_back(args.first_position + token);
  state.queries.q.insert(state.queries.q.end(), args.q + token * q_size, args.q + (token + 1) * q_size);
  state.queries.out.insert(state.queries.out.end(), args.out + token * out_size, args.out + (token + 1) * out_size);
}

void KeepCollector::after_chunk(int layer, int64_t prompt_end, const PrefillAttendArgs& args, const KvRotate& rotate,
                                ThreadPool& pool) {
  State& state = states_[size_t(layer)];
  const int64_t last_from = prompt_end - needs_.last_queries;
  const int64_t step =
      needs_.sampled_queries > 0 ? ceil_div(prompt_end - state.start, needs_.sampled_queries) : prompt_end;
  for (int64_t t = 0; t < args.tokens; ++t) {
    const int64_t position = args.first_position + t;
    const bool sampled = needs_.sampled_queries > 0 && (prompt_end - 1 - position) % step == 0;
    if (position >= last_from || sampled) take_query(state, args, t);
  }
  if (needs_.statistics_from >= 0) add_statistics(state, layer, args, rotate, pool);
}

void KeepCollector::add_statistics(State& state, int layer, const PrefillAttendArgs& args, const KvRotate& rotate,
                                   ThreadPool& pool) {
  const int64_t d = shape_.dim_k, heads = query_heads();
  const int64_t first = std::clamp<int64_t>(needs_.statistics_from - args.first_position, 0, args.tokens);
  const int64_t n = args.tokens - first;
  if (n == 0) return;
  turned_.assign(args.q + first * heads * d, args.q + args.tokens * heads * d);
  constexpr int64_t kTokensPerTask = 16;
  pool.run(ceil_div(n, kTokensPerTask), [&](int64_t task, int) {
    for (int64_t t = task * kTokensPerTask; t < std::min(n, (task + 1) * kTokensPerTask); ++t) {
      rotate(layer, -double(args.first_position + first + t), turned_.data() + t * heads * d, heads, d);
    }
  });
  pool.run(heads, [&](int64_t h, int) {
    double* sum = state.statistics.sum.data() + h * d;
    double* product = state.statistics.product.data() + h * d * d;
    std::vector<float> columns(size_t(d * kQueriesAtOnce)), products(size_t(d * d));
    for (int64_t begin = 0; begin < n; begin += kQueriesAtOnce) {
      const int64_t count = std::min(n - begin, kQueriesAtOnce);
      const float* q = turned_.data() + (begin * heads + h) * d;
      for (int64_t t = 0; t < count; ++t) {
        for (int64_t i = 0; i < d; ++i) sum[i] += q[t * heads * d + i];
      }
      transpose(q, count, d, heads * d, columns.data(), count);
      std::fill(products.begin(), products.end(), 0.0f);
      gemm_add(d, d, count, columns.data(), count, q, heads * d, products.data(), d);
      for (int64_t i = 0; i < d * d; ++i) product[i] += products[size_t(i)];
    }
  });
  state.statistics.n += n;
}

void KeepCollector::give(int layer, KeepInput& input) {
  State& state = states_[size_t(layer)];
  if (needs_.mass_queries > 0) {
    // Without a prompt (rows filled for a measurement) nothing gave mass.
    if (state.mass.empty()) {
      for (const KvHeadView& head : input.heads) state.mass_stride = std::max(state.mass_stride, head.rows);
      state.mass.assign(size_t(state.mass_stride * query_heads()), 0.0f);
      state.mass_queries = 0;
    }
    input.mass = state.mass.data();
    input.mass_stride = state.mass_stride;
    input.mass_queries = state.mass_queries;
  }
  if (needs_.last_queries > 0 || needs_.sampled_queries > 0) input.queries = &state.queries;
  if (needs_.statistics_from >= 0) {
    if (state.start < 0) begin(state, input.tokens);
    input.statistics = &state.statistics;
  }
  if (state.start >= 0) input.prompt_tokens = input.tokens - state.start;
}

void KeepCollector::drop(int layer) {
  State& state = states_[size_t(layer)];
  if (!state.mass.empty()) free_mass_.push_back(std::move(state.mass));
  state = State{};
}

}  // namespace longkv
