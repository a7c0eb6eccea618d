// How far encoded rows reach, against a model of the memory that they and the ring are: needs no card.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cuda/old_border.h"

namespace longkv {
namespace {

using card::kOldStep;

// Rows by a number of their own each; what CardOldRows and its kernels do to memory, done to such numbers.
class Memory {
 public:
  Memory(int layers, int64_t sink, int64_t window, int64_t block)
      : sink_(sink), window_(window), block_(block), ring_(card::old_ring(window)), border_(layers, sink, window) {
    layers_.resize(size_t(layers));
    for (Layer& l : layers_) l.raw.assign(size_t(sink + ring_), -1);
  }

  int64_t rows() const { return int64_t(truth_.size()); }
  void prompt(int64_t n, int layers_before_it_stops) {
    const int64_t start = rows();
    std::vector<int64_t> longer = truth_;
    for (int64_t i = 0; i < n; ++i) longer.push_back(next_++);
    const bool stops = layers_before_it_stops < int(layers_.size());
    for (int l = 0; l < std::min(int(layers_.size()), layers_before_it_stops); ++l) {
      Layer& layer = layers_[size_t(l)];
      std::vector<int64_t> work;
      for (int64_t r = 0; r < start; ++r) work.push_back(held(layer, r, border_.end()));
      ASSERT_EQ(work, truth_) << "what a prompt attends of " << start << " rows, layer " << l;
      work.insert(work.end(), longer.begin() + start, longer.end());
      const int64_t from = border_.end(l), to = border_.take(l, start + n);
      encode(layer, from, to, [&](int64_t r) { return work[size_t(r)]; });
      for (int64_t r = 0; r < std::min(start + n, sink_); ++r) at(layer, r) = work[size_t(r)];
      for (int64_t r = to; r < start + n; ++r) at(layer, r) = work[size_t(r)];
    }
    if (stops) return cut(start);
    truth_ = longer;
    border_.count(rows());
  }
  void decode() {
    truth_.push_back(next_++);
    for (Layer& layer : layers_) {
      at(layer, rows() - 1) = truth_.back();
      // A block that the row completes is summarised from the ring.
      for (int64_t r = rows() % block_ == 0 ? rows() - block_ : rows(); r < rows(); ++r)
        ASSERT_EQ(at(layer, r), truth_[size_t(r)]) << "row " << r << " of a block that " << rows() << " rows complete";
      for (int64_t r = 0; r < rows(); ++r)
        ASSERT_EQ(held(layer, r, border_.end()), truth_[size_t(r)]) << "row " << r << " of " << rows();
      const int64_t end = border_.end();
      if (card::old_end(rows(), sink_, window_) > end)
        encode(layer, end, end + kOldStep, [&](int64_t r) { return at(layer, r); });
    }
    border_.count(rows());
  }
  void cut(int64_t n) {
    const int64_t to = border_.end_of_cut(n);
    for (int l = 0; l < int(layers_.size()); ++l) {
      Layer& layer = layers_[size_t(l)];
      for (int64_t r = to; r < std::min(n, border_.end(l)); ++r) at(layer, r) = layer.encoded[size_t(r - sink_)];
    }
    border_.cut(n);
    truth_.resize(size_t(n));
    ASSERT_EQ(border_.end(), card::old_end(n, sink_, window_));
  }

 private:
  struct Layer {
    std::vector<int64_t> raw, encoded;
  };
  int64_t& at(Layer& l, int64_t row) { return l.raw[size_t(row < sink_ ? row : sink_ + (row - sink_) % ring_)]; }
  int64_t held(Layer& l, int64_t row, int64_t end) {
    return row < sink_ || row >= end ? at(l, row) : l.encoded[size_t(row - sink_)];
  }
  template <class RowOf>
  void encode(Layer& l, int64_t from, int64_t to, const RowOf& row_of) {
    if (int64_t(l.encoded.size()) < to - sink_) l.encoded.resize(size_t(to - sink_), -1);
    for (int64_t r = from; r < to; ++r) l.encoded[size_t(r - sink_)] = row_of(r);
  }

  int64_t sink_, window_, block_, ring_, next_ = 0;
  card::OldBorder border_;
  std::vector<Layer> layers_;
  std::vector<int64_t> truth_;
};

TEST(CardOldBorder, AShortPromptAfterACut) {
  Memory m(2, 0, 128, 64);
  m.prompt(2500, 2);
  for (int i = 0; i < 100; ++i) m.decode();
  m.cut(2333);
  m.prompt(20, 2);
  for (int i = 0; i < 40; ++i) m.decode();
}

TEST(CardOldBorder, ABlockThatBeganBeforeACut) {
  Memory m(1, 0, 128, 64);
  m.prompt(2600, 1);
  m.cut(2350);
  for (int i = 0; i < 100; ++i) m.decode();
}

TEST(CardOldBorder, AShortPromptAfterAnInterruptedOne) {
  Memory m(3, 16, 128, 64);
  m.prompt(1000, 3);
  m.prompt(1000, 2);
  m.prompt(20, 3);
  for (int i = 0; i < 200; ++i) m.decode();
}

TEST(CardOldBorder, AnyOrderOfPromptsTokensAndCuts) {
  std::mt19937 random(5);
  const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  for (const auto& [sink, window] : {std::pair<int64_t, int64_t>{0, 0},
                                     {0, 1},
                                     {0, 32},
                                     {16, 40},
                                     {16, 64},
                                     {128, 96},
                                     {32, 127},
                                     {0, 128},
                                     {48, 129}}) {
    SCOPED_TRACE(testing::Message() << "sink " << sink << ", window " << window);
    Memory m(3, sink, window, std::max<int64_t>(1, window));
    for (int i = 0; i < 300 && !testing::Test::HasFailure(); ++i) {
      switch (below(5)) {
        case 0: m.prompt(1 + below(below(2) == 0 ? 40 : 700), 3); break;
        case 1: m.prompt(1 + below(below(2) == 0 ? 40 : 700), int(below(3))); break;
        case 2: m.cut(below(m.rows() + 1)); break;
        case 3: m.cut(std::max<int64_t>(0, m.rows() - below(200))); break;
        default:
          for (int64_t n = below(100); n > 0; --n) m.decode();
      }
      if (m.rows() > 3000) m.cut(below(300));
    }
  }
}

}  // namespace
}  // namespace longkv
