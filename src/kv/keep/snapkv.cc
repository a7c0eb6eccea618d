#include "kv/keep/snapkv.h"

#include <cmath>

#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"

namespace longkv {

void SnapkvKeeper::score(const KeepInput& input, RowScores& scores) {
  const int group = input.group_size;
  input.pool->run(int64_t(input.heads.size()), [&](int64_t h, int) {
    const int64_t rows = input.heads[size_t(h)].rows;
    float* own = scores[size_t(h)].data();
    reduce_group(spec_.reduce, input.mass + h * group * input.mass_stride, input.mass_stride, group, rows, own);
    pool_scores(spec_.pool, spec_.kernel, std::max<int64_t>(0, rows - spec_.window), own);
  });
}

namespace {

// Rows that layer l of L selects, for c on average out of n. The line from `hi` to `lo` is summed exactly and rounded
// as a whole, so that the layers select L * c rows together.
int64_t pyramid_selected(int64_t c, int64_t n, double beta, int64_t l, int64_t layers) {
  int64_t lo = int64_t(double(c) / beta);
  int64_t hi = 2 * c - lo;
  if (hi >= n) {
    hi = n;
    lo = 2 * c - hi;
  }
  if (hi < lo || layers < 2) return c;
  // Twice L - 1 times the rows of the layers before.
  const auto before = [&](int64_t i) { return 2 * (layers - 1) * i * hi - (hi - lo) * i * (i - 1); };
  const auto rounded = [&](int64_t i) { return (before(i) + layers - 1) / (2 * (layers - 1)); };
  return rounded(l + 1) - rounded(l);
}

}  // namespace

int64_t pyramid_budget(const KeepSpec& spec, int layer, int layers, int64_t tokens) {
  const int64_t total = keep_budget(spec, tokens);
  if (!spec.window_inside) {
    if (tokens <= total) return tokens;
    const int64_t c = total - spec.window;
    if (tokens < 2 * c) return total;
    return spec.window + pyramid_selected(c, tokens - spec.window, spec.beta, layer, layers);
  }
  const double c = spec.budget > 0 ? double(spec.budget) : double(tokens) * spec.keep_ratio;
  double lo = c / spec.beta, hi = 2 * c - lo;
  if (hi >= double(tokens - spec.window)) {
    hi = double(tokens - spec.window);
    lo = 2 * c - hi;
  }
  const bool line = double(tokens) >= hi && hi >= lo && lo >= double(spec.window) && layers > 1;
  if (!line) return int64_t(std::nearbyint(c));
  return int64_t(std::nearbyint(hi - (hi - lo) / (layers - 1) * layer));
}

namespace {

class PyramidKeeper : public SnapkvKeeper {
 public:
  using SnapkvKeeper::SnapkvKeeper;

 protected:
  int64_t layer_budget(int layer, int layers, int64_t tokens) const override {
    return pyramid_budget(spec_, layer, layers, tokens);
  }
};

}  // namespace

std::unique_ptr<Keeper> make_snapkv(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<SnapkvKeeper>(spec, shape);
}
std::unique_ptr<Keeper> make_pyramidkv(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<PyramidKeeper>(spec, shape);
}

}  // namespace longkv
