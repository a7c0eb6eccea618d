#ifdef LONGKV_WITH_CUDA

#include "cuda/card_graph.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/card_plan.h"
#include "cuda/carver.h"

namespace longkv {

namespace {

int64_t qkv_width(const ModelConfig& c) { return int64_t(c.heads + 2 * c.kv_heads) * c.head_dim_k; }

}  // namespace

Status CardGraph::rope(const RopeConfig& config, int64_t context, card::CardRope& out, CardBuffer& memory) {
  // One position suffices for frequencies and magnitude; the tables for the card are built here.
  const RopeTable table(config, 1);
  const int half = table.dim() / 2;
  const int64_t coarse = context / 1024 + 1;
  std::vector<double> host(size_t(1024 + coarse) * size_t(half) * 2);
  for (int64_t r = 0; r < 1024 + coarse; ++r) {
    const double position = r < 1024 ? double(r) : double((r - 1024) * 1024);
    for (int i = 0; i < half; ++i) {
      const double angle = position * double(table.inverse_frequencies()[size_t(i)]);
      host[size_t(r * half + i) * 2] = std::cos(angle);
      host[size_t(r * half + i) * 2 + 1] = std::sin(angle);
    }
  }
  LONGKV_ASSIGN(
      memory, CardBuffer::create(*model_->impl().memory, int64_t(host.size() * sizeof(double)), "tables of positions"));
  LONGKV_TRY(cuda_status(cudaMemcpy(memory.data(), host.data(), host.size() * sizeof(double), cudaMemcpyHostToDevice),
                         "tables of positions"));
  out = {memory.as<double>(), memory.as<double>() + 1024 * int64_t(half) * 2, half, table.pairs(),
         float(table.magnitude())};
  return {};
}

int64_t CardGraph::chunk_bytes(const ModelConfig& c, int64_t chunk) { return card_chunk_bytes(c, chunk); }

int64_t CardGraph::fixed_bytes(const CardModel& model, int64_t context) {
  int64_t largest = 0;
  for (int i = 0; i < model.host_layers(); ++i) largest = std::max(largest, model.impl().layers[size_t(i)].bytes());
  return card_graph_bytes(model.model().config(), model.device().multiprocessors, context) +
         (largest > 0 ? card_feed_bytes(largest) : 0);
}

Status CardGraph::allocate(int64_t context, int64_t chunk) {
  const ModelConfig& c = config();
  CardModel::Impl& m = model_->impl();
  const int64_t width = qkv_width(c), heads = int64_t(c.heads) * c.head_dim_k, wide = std::max(c.dim, heads);
  LONGKV_TRY(rope(model_->model().rope_for(context), context, rope_, rope_memory_));
  if (c.rope_window) LONGKV_TRY(rope(*c.rope_window, context, rope_window_, rope_window_memory_));
  const int64_t half = std::max(rope_.half, rope_window_.half);

  const auto token = [&](Carver carve) {
    token_.hidden = carve.take<float>(c.dim);
    token_.position = carve.take<int64_t>(4);
    token_.qkv = carve.take<float>(width);
    token_.gate_up = carve.take<float>(2 * c.ff_dim);
    token_.proj = carve.take<float>(c.dim);
    token_.logits = carve.take<float>(c.vocab);
    token_.angles = carve.take<float>(2 * half);
    token_.angles_window = carve.take<float>(2 * half);
    token_.q = carve.take<card::half_t>(heads);
    token_.attention = carve.take<float>(heads);
    token_.row = card::CardRow::at(carve.take<uint8_t>(card::CardRow::bytes(wide)), wide);
    token_.ff = card::CardRow::at(carve.take<uint8_t>(card::CardRow::bytes(c.ff_dim)), c.ff_dim);
    card::DecodeScratch& s = token_.scratch;
    s.splits = card_splits(m.card.multiprocessors, c.kv_heads);
    s.out = carve.take<float>(int64_t(c.heads) * (s.splits + kCardRawSplits) * c.head_dim_k);
    s.lse = carve.take<float>(int64_t(c.heads) * (s.splits + kCardRawSplits));
    token_.old_q = carve.take<card::half_t>(heads);
    token_.shift = carve.take<float>(c.heads);
    return carve.used();
  };
  LONGKV_ASSIGN(token_memory_, CardBuffer::create(*m.memory, token(Carver(nullptr)), "buffers of a token"));
  token(Carver(token_memory_.data()));

  const auto chunks = [&](Carver carve) {
    chunk_.first = carve.take<int64_t>(2);
    chunk_.qkv = carve.take<float>(chunk * width);
    chunk_.gate_up = carve.take<float>(chunk * 2 * c.ff_dim);
    chunk_.proj = carve.take<float>(chunk * c.dim);
    chunk_.row_scale = carve.take<float>(chunk);
    chunk_.angles = carve.take<float>(chunk * 2 * half);
    chunk_.angles_window = carve.take<float>(chunk * 2 * half);
    chunk_.norm = carve.take<card::half_t>(chunk * c.dim);
    chunk_.q = carve.take<card::half_t>(chunk * heads);
    chunk_.attention = carve.take<card::half_t>(chunk * heads);
    chunk_.act = carve.take<card::half_t>(chunk * c.ff_dim);
    return carve.used();
  };
  LONGKV_ASSIGN(chunk_memory_, CardBuffer::create(*m.memory, chunks(Carver(nullptr)), "buffers of a prompt's chunk"));
  chunks(Carver(chunk_memory_.data()));

  const auto weights = [&](Carver carve) {
    weights_.qkv = carve.take<card::half_t>(width * c.dim);
    weights_.o = carve.take<card::half_t>(heads * c.dim);
    weights_.gate_up = carve.take<card::half_t>(2 * c.ff_dim * c.dim);
    weights_.down = carve.take<card::half_t>(c.ff_dim * c.dim);
    return carve.used();
  };
  LONGKV_ASSIGN(weight_memory_, CardBuffer::create(*m.memory, weights(Carver(nullptr)), "a layer's decoded weights"));
  weights(Carver(weight_memory_.data()));
  return {};
}

Result<std::unique_ptr<CardGraph>> CardGraph::create(std::shared_ptr<CardModel> model, int64_t context, int64_t chunk) {
  std::unique_ptr<CardGraph> graph(new CardGraph());
  graph->model_ = std::move(model);
  LONGKV_ASSIGN(graph->gemm_, CardGemm::create(*graph->model_->impl().memory));
  LONGKV_TRY(graph->allocate(context, chunk));
  if (graph->model_->host_layers() > 0) {
    LONGKV_ASSIGN(graph->feed_, LayerFeed::create(graph->model_));
  }
  return graph;
}

Status CardGraph::matvec(const CardStack& stack, const card::CardRow& x, const float* bias, bool add, float* y,
                         cudaStream_t stream) {
  int64_t at = 0;
  for (const CardMatrix& m : stack.parts) {
    LONGKV_TRY(card::matvec(m, x, bias != nullptr ? bias + at : nullptr, add, y + at, stream));
    at += m.rows;
  }
  return {};
}

card::AttendArgs CardGraph::attend_args(const CardLayer& l, const card::CardKv& kv, const card::half_t* q) const {
  const ModelConfig& c = config();
  return {q, c.heads, kv, c.attn_scale, c.attn_softcap, l.window};
}

card::AppendArgs CardGraph::append_args(const CardLayer& l, const card::CardKv& kv) const {
  const ModelConfig& c = config();
  card::AppendArgs a;
  a.heads = c.heads;
  a.bias = l.qkv_bias;
  a.q_norm = l.q_norm;
  a.k_norm = l.k_norm;
  a.eps = c.norm_eps;
  a.rope = rope_of(l);
  a.kv = kv;
  return a;
}

Status CardGraph::begin_token(cudaStream_t stream) {
  LONGKV_TRY(card::rope_angles(rope_, token_.position, 1, token_.angles, stream));
  if (rope_window_.half > 0)
    LONGKV_TRY(card::rope_angles(rope_window_, token_.position, 1, token_.angles_window, stream));
  return {};
}

Status CardGraph::qkv_token(int i, const card::CardKv& kv, cudaStream_t stream, const card::BlockStore& store,
                            const int32_t* slot_of, const int64_t* row_at) {
  const CardLayer& l = layer(i);
  const ModelConfig& c = config();
  const card::CardRow row = card::CardRow::at(reinterpret_cast<uint8_t*>(token_.row.f), c.dim);
  LONGKV_TRY(card::norm_row(token_.hidden, l.attn_norm, c.norm_eps, c.dim, row, stream));
  LONGKV_TRY(matvec(l.qkv, row, nullptr, false, token_.qkv, stream));
  card::AppendArgs a = append_args(l, kv);
  a.qkv = token_.qkv;
  a.n = 1;
  a.angles = l.window_rope ? token_.angles_window : token_.angles;
  a.first = row_at != nullptr ? row_at : token_.position;
  a.q = token_.q;
  a.store = store;
  a.slot_of = slot_of;
  return card::append_rows(a, stream);
}

Status CardGraph::attend_token(int i, const card::CardKv& kv, const card::TileList& list, cudaStream_t stream,
                               const int64_t* row_at) {
  const ModelConfig& c = config();
  const card::CardRow row =
      card::CardRow::at(reinterpret_cast<uint8_t*>(token_.row.f), int64_t(c.heads) * c.head_dim_k);
  LONGKV_TRY(card::attend_token(attend_args(layer(i), kv, token_.q), list, row_at != nullptr ? row_at : token_.position,
                                token_.scratch, stream));
  return card::merge_partials(token_.scratch, c.heads, c.head_dim_k, row, stream);
}

// The rows as they came, then the encoded ones; their partials are merged together.
Status CardGraph::attend_token(int i, const CardOldRows& rows, const card::TileList& list, cudaStream_t stream) {
  const ModelConfig& c = config();
  card::DecodeScratch old = token_.scratch, raw = token_.scratch;
  raw.splits = kCardRawSplits;
  raw.all = old.all = old.splits + raw.splits;
  old.first = raw.splits;
  card::AttendArgs a = attend_args(layer(i), rows.rows(i), token_.q);
  a.old_end = rows.old(i).end;
  LONGKV_TRY(card::attend_token(a, list, token_.position, raw, stream));
  card::AttendOldArgs b{token_.q, nullptr, c.heads, rows.old(i), c.attn_scale, c.attn_softcap};
  if (rows.masked()) {
    b.q = token_.old_q, b.shift = token_.shift;
    LONGKV_TRY(rows.gather(i, token_.q, c.heads, c.attn_scale, token_.old_q, token_.shift, stream));
  }
  LONGKV_TRY(card::attend_old(b, list, old, stream));
  const card::CardRow row =
      card::CardRow::at(reinterpret_cast<uint8_t*>(token_.row.f), int64_t(c.heads) * c.head_dim_k);
  return card::merge_partials(old, c.heads, c.head_dim_k, row, stream);
}

Status CardGraph::take_attention(const float* out, cudaStream_t stream) {
  const ModelConfig& c = config();
  const int64_t n = int64_t(c.heads) * c.head_dim_k;
  float* landing = token_.attention;
  LONGKV_TRY(cuda_status(cudaMemcpyAsync(landing, out, size_t(n) * 4, cudaMemcpyHostToDevice, stream), "attention"));
  return card::norm_row(landing, nullptr, 0.0f, n, card::CardRow::at(reinterpret_cast<uint8_t*>(token_.row.f), n),
                        stream);
}

Status CardGraph::finish_token(int i, cudaStream_t stream) {
  const CardLayer& l = layer(i);
  const ModelConfig& c = config();
  const card::CardRow attention =
      card::CardRow::at(reinterpret_cast<uint8_t*>(token_.row.f), int64_t(c.heads) * c.head_dim_k);
  const card::CardRow row = card::CardRow::at(reinterpret_cast<uint8_t*>(token_.row.f), c.dim);
  // Where nothing is normalised in between, a product adds to the residual stream itself.
  const auto join = [&](const CardStack& w, const card::CardRow& x, const float* bias, const float* norm) -> Status {
    if (norm == nullptr) return matvec(w, x, bias, true, token_.hidden, stream);
    LONGKV_TRY(matvec(w, x, bias, false, token_.proj, stream));
    return card::add_norm_row(token_.proj, norm, c.norm_eps, c.dim, token_.hidden, stream);
  };
  LONGKV_TRY(join(l.o, attention, l.o_bias, l.post_attn_norm));
  LONGKV_TRY(card::norm_row(token_.hidden, l.ffn_norm, c.norm_eps, c.dim, row, stream));
  LONGKV_TRY(matvec(l.gate_up, row, nullptr, false, token_.gate_up, stream));
  LONGKV_TRY(card::gate_row(c.activation, token_.gate_up, c.ff_dim, token_.ff, stream));
  return join(l.down, token_.ff, nullptr, l.post_ffn_norm);
}

Status CardGraph::output(const float* hidden, cudaStream_t stream) {
  const ModelConfig& c = config();
  const CardModel::Impl& m = model_->impl();
  const card::CardRow row = card::CardRow::at(reinterpret_cast<uint8_t*>(token_.row.f), c.dim);
  LONGKV_TRY(card::norm_row(hidden, m.output_norm, c.norm_eps, c.dim, row, stream));
  LONGKV_TRY(matvec(m.output, row, nullptr, false, token_.logits, stream));
  if (c.final_softcap > 0.0f) LONGKV_TRY(card::softcap(token_.logits, c.final_softcap, c.vocab, stream));
  return {};
}

Status CardGraph::read_sparsely(const PrefillSpec& spec, int64_t context, int64_t chunk) {
  LONGKV_ASSIGN(sparse_, CardSparse::create(*model_->impl().memory, config(), spec, context, chunk));
  return {};
}

Status CardGraph::begin_rows(int i, const card::CardKv& rows, int64_t start, cudaStream_t stream) {
  if (!sparse_ || !sparse_->applies(i, INT64_MAX)) return {};  // the prompt may be long
  return sparse_->begin_layer(i, rows, start, stream);
}

Status CardGraph::load_layer(int i, cudaStream_t stream) {
  const CardLayerStacks* l = &layer(i);
  if (i < model_->host_layers()) {
    LONGKV_ASSIGN(l, feed_->begin(i, stream));
  }
  const std::pair<const CardStack*, card::half_t*> stacks[] = {
      {&l->qkv, weights_.qkv}, {&l->o, weights_.o}, {&l->gate_up, weights_.gate_up}, {&l->down, weights_.down}};
  for (const auto& [stack, to] : stacks) {
    int64_t at = 0;
    for (const CardMatrix& m : stack->parts) {
      LONGKV_TRY(card::decode_matrix(m, 0, m.rows, to + at * m.cols, stream));
      at += m.rows;
    }
  }
  return {};
}

Status CardGraph::begin_chunk(int64_t first, int64_t n, cudaStream_t stream) {
  LONGKV_TRY(card::set_position(chunk_.first, first, stream));
  LONGKV_TRY(card::rope_angles(rope_, chunk_.first, n, chunk_.angles, stream));
  if (rope_window_.half > 0) LONGKV_TRY(card::rope_angles(rope_window_, chunk_.first, n, chunk_.angles_window, stream));
  return {};
}

Status CardGraph::products(const CardStack& stack, const card::half_t* weights, const card::half_t* x, int64_t n,
                           bool add, float* y, cudaStream_t stream) {
  return gemm_->run(x, weights, n, stack.rows, stack.cols, add, y, stack.rows, stream);
}

Status CardGraph::prefill_layer(int i, const card::CardKv& kv, const card::CardKv* work, float* hidden, int64_t first,
                                int64_t n, int64_t prompt_end, cudaStream_t stream, int64_t dropped) {
  const CardLayer& l = layer(i);
  const ModelConfig& c = config();
  LONGKV_TRY(card::norm_rows(hidden, l.attn_norm, c.norm_eps, n, c.dim, chunk_.norm, stream));
  LONGKV_TRY(products(l.qkv, weights_.qkv, chunk_.norm, n, false, chunk_.qkv, stream));
  card::AppendArgs a = append_args(l, kv);
  a.qkv = chunk_.qkv;
  a.n = n;
  a.angles = l.window_rope ? chunk_.angles_window : chunk_.angles;
  a.first = chunk_.first;
  if (dropped > 0) {
    a.first = chunk_.first + 1;
    LONGKV_TRY(card::set_position(chunk_.first + 1, first - dropped, stream));
  }
  a.q = chunk_.q;
  a.work = work;
  LONGKV_TRY(card::append_rows(a, stream));
  const card::AttendArgs attend = attend_args(l, work != nullptr ? *work : kv, chunk_.q);
  if (sparse_ && sparse_->applies(i, prompt_end)) {
    LONGKV_TRY(sparse_->attend(i, attend, first, n, prompt_end, *gemm_, chunk_.attention, stream));
  } else {
    if (sparse_) sparse_->count_dense(attend.window, first, n);
    LONGKV_TRY(card::attend_prompt(attend, first - dropped, n, chunk_.attention, stream));
  }
  if (l.post_attn_norm == nullptr && l.o_bias == nullptr) {
    LONGKV_TRY(products(l.o, weights_.o, chunk_.attention, n, true, hidden, stream));
  } else {
    LONGKV_TRY(products(l.o, weights_.o, chunk_.attention, n, false, chunk_.proj, stream));
    LONGKV_TRY(card::add_rows(chunk_.proj, nullptr, l.o_bias, l.post_attn_norm, c.norm_eps, n, c.dim, hidden, stream));
  }
  LONGKV_TRY(card::norm_rows(hidden, l.ffn_norm, c.norm_eps, n, c.dim, chunk_.norm, stream));
  LONGKV_TRY(products(l.gate_up, weights_.gate_up, chunk_.norm, n, false, chunk_.gate_up, stream));
  LONGKV_TRY(card::gate_rows(c.activation, chunk_.gate_up, n, c.ff_dim, chunk_.act, chunk_.row_scale, stream));
  LONGKV_TRY(products(l.down, weights_.down, chunk_.act, n, false, chunk_.proj, stream));
  return card::add_rows(chunk_.proj, chunk_.row_scale, nullptr, l.post_ffn_norm, c.norm_eps, n, c.dim, hidden, stream);
}

}  // namespace longkv

#endif
