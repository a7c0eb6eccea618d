// Merging while the prompt is read: at each chunk a layer's rows are brought back to the budget, so that no layer ever
// holds more than budget + chunk rows. What the methods share; a method says how rows are weighed.
#pragma once

#include <span>
#include <vector>

#include "kv/keep/keep.h"
#include "kv/keep/merge.h"

namespace longkv {

// Numbers of rows that are means over the chunks of a prompt that a row has met: x <- new / t + x (t - 1) / t at the
// t-th chunk for rows that were there, the new number for others (as both releases do).
class RunningRows {
 public:
  explicit RunningRows(const KvShape& shape);
  // now: [rows][width], the newest rows last; blended in place.
  void blend(int layer, int head, std::span<float> now, int64_t width);
  // What is kept of it, after rows left or were merged.
  void keep(int layer, int head, std::span<const int64_t> rows, const float* values, int64_t width);
  void clear(int layer, int head);
  void clear();

 private:
  struct Head {
    int64_t chunks = 0;
    std::vector<float> values;
  };
  size_t heads_;
  std::vector<Head> state_;  // [layers][kv_heads]
};

class MergeKeeper : public Keeper {
 public:
  MergeKeeper(const KeepSpec& spec, const KvShape& shape);

  KeepNeeds needs() const override;
  Status choose(const KeepInput& input, KeepChoice& choice) override;
  void truncated(const KvCache& cache) override;
  int64_t planned_rows(int layer, int layers, int64_t tokens) const override;

 protected:
  // Fills weights of a head's rows, and what else merge_links() wants of the method.
  virtual void weigh(const KeepInput& input, int head, MergeRows& rows);
  // After merge_links(): what the method remembers of the rows until the next chunk.
  virtual void remember(const KeepInput& input, int head, std::span<const int64_t> kept, const MergeRows& rows);

  KeepSpec spec_;
  KvShape shape_;
  RunningRows running_;

 private:
  MergeRows rows_of(const KeepInput& input, int head) const;
  bool wants_sample() const;
  void take_sample(const KeepInput& input, int head, MergeRows& rows) const;
  void weigh_as_released(const KeepInput& input, int head, MergeRows& rows);
  void place_by_count(const KeepInput& input, const std::vector<MergeRows>& rows, KeepChoice& choice) const;
};

}  // namespace longkv
