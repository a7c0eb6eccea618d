#include "eval/summary.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

namespace longkv {

namespace {

using Cell = std::tuple<std::string, std::string, int, int64_t>;  // suite, task, version, length
using Prompt = std::pair<int64_t, int64_t>;                       // index, thousandths of depth

Prompt prompt_of(const EvalRecord& r) { return {r.index, int64_t(r.depth * 1000)}; }

struct Group {
  std::vector<const EvalRecord*> records;
};

// Means over the answered records of a cell and recipe.
SummaryRow summarise_group(const std::vector<const EvalRecord*>& group,
                           const std::map<Prompt, const EvalRecord*>& full) {
  const EvalRecord& first = *group.front();
  SummaryRow row;
  row.suite = first.suite;
  row.task = first.task;
  row.version = first.version;
  row.length = first.length;
  row.kv = first.kv;
  row.label = first.label;
  row.question = first.question;
  std::vector<double> scores, paired, paired_full;
  double speed = 0;
  int64_t same_text = 0, checked = 0;
  for (const EvalRecord* r : group) {
    if (!r->skipped.empty()) {
      ++row.skipped;
      continue;
    }
    row.metric = r->metric;
    row.sparse = r->sparse;
    row.read_on = r->read_on;
    row.jobs = std::max(row.jobs, r->jobs);
    row.lower_is_better = r->metric == "nll";
    scores.push_back(r->score);
    row.flagged += r->candidates > int64_t(r->references.size());
    row.empty += !row.lower_is_better && r->text.find_first_not_of(" \t\r\n") == std::string::npos;
    if (const auto f = full.find(prompt_of(*r)); f != full.end()) {
      paired.push_back(r->score);
      paired_full.push_back(f->second->score);
      same_text += r->text == f->second->text && r->answer_hash == f->second->answer_hash;
    }
    row.compared += r->compared;
    row.kl_mean += r->kl_mean * double(r->compared);
    row.kl_max = std::max(row.kl_max, r->kl_max);
    row.same_top += r->same_top * double(r->compared);
    if (r->checked > 0) {
      ++checked;
      row.captured_mass += r->captured_mass;
      row.output_error += r->output_error;
      row.layer_mass.resize(std::max(row.layer_mass.size(), r->layer_mass.size()));
      for (size_t l = 0; l < r->layer_mass.size(); ++l) row.layer_mass[l] += r->layer_mass[l];
      row.head_mass.resize(std::max(row.head_mass.size(), r->head_mass.size()));
      for (size_t h = 0; h < r->head_mass.size(); ++h) row.head_mass[h] += r->head_mass[h];
    }
    row.kl_buckets.resize(std::max(row.kl_buckets.size(), r->kl_buckets.size()));
    for (size_t b = 0; b < r->kl_buckets.size(); ++b) row.kl_buckets[b] += r->kl_buckets[b];
    row.rows_attended += r->rows_attended;
    row.share_attended += r->rows_attended / double(std::max<int64_t>(1, r->prompt_tokens));
    row.bytes_per_token += r->bytes_per_token;
    row.kept_rows += r->kept_rows;
    row.kept_bytes += double(r->kept_bytes);
    row.index_bytes += double(r->index_bytes);
    speed += r->seconds_per_token;
    row.prefill_seconds += r->prefill_seconds;
    row.shared_prefill = r->shared_prefill;
  }
  const double n = double(std::max<size_t>(1, scores.size()));
  row.score = mean_interval(scores, !row.lower_is_better);
  row.against_full = paired_difference(paired, paired_full, !row.lower_is_better);
  row.agreement = paired.empty() ? 0 : double(same_text) / double(paired.size());
  if (row.compared > 0) {
    row.kl_mean /= double(row.compared);
    row.same_top /= double(row.compared);
  }
  if (checked > 0) {
    row.captured_mass /= double(checked);
    row.output_error /= double(checked);
    for (double& m : row.layer_mass) m /= double(checked);
    for (double& m : row.head_mass) m /= double(checked);
  } else {
    row.captured_mass = 1;
  }
  for (double& b : row.kl_buckets) b /= n;
  for (double* mean : {&row.rows_attended, &row.share_attended, &row.bytes_per_token, &row.kept_rows, &row.kept_bytes,
                       &row.index_bytes, &row.prefill_seconds}) {
    *mean /= n;
  }
  row.tokens_per_second = speed > 0 ? n / speed : 0;
  return row;
}

std::vector<TotalRow> total(const std::vector<SummaryRow>& rows) {
  std::vector<TotalRow> totals;
  const auto full_score = [&](const SummaryRow& row) {
    for (const SummaryRow& f : rows) {
      if (f.label == "full" && f.task == row.task && f.suite == row.suite && f.length == row.length)
        return f.score.mean;
    }
    return row.score.mean;
  };
  for (const SummaryRow& row : rows) {
    auto found = std::find_if(totals.begin(), totals.end(),
                              [&](const TotalRow& t) { return t.kv == row.kv && t.length == row.length; });
    if (found == totals.end()) {
      TotalRow t;
      t.kv = row.kv;
      t.label = row.label;
      t.length = row.length;
      found = totals.insert(totals.end(), t);
    }
    found->skipped += row.skipped;
    if (row.lower_is_better || row.score.n == 0) continue;
    TotalRow& t = *found;
    ++t.tasks;
    t.n += row.score.n;
    t.mean += row.score.mean;
    t.low += (row.score.mean - row.score.low) * (row.score.mean - row.score.low);
    t.high += (row.score.high - row.score.mean) * (row.score.high - row.score.mean);
    t.agreement += row.agreement;
    t.kl_mean += row.kl_mean;
    t.captured_mass += row.captured_mass;
    t.rows_attended += row.rows_attended;
    t.bytes_per_token += row.bytes_per_token;
    t.kept_bytes += row.kept_bytes + row.index_bytes;
    t.tokens_per_second += row.tokens_per_second;
    t.better += row.against_full.better;
    t.worse += row.against_full.worse;
    if (row.score.mean < t.smallest || t.tasks == 1) {
      t.smallest = row.score.mean;
      t.smallest_task = row.task;
    }
    const double drop = full_score(row) - row.score.mean;
    if (drop > t.largest_drop) {
      t.largest_drop = drop;
      t.largest_drop_task = row.task;
    }
  }
  for (TotalRow& t : totals) {
    const double tasks = double(std::max<int64_t>(1, t.tasks));
    for (double* mean : {&t.mean, &t.agreement, &t.kl_mean, &t.captured_mass, &t.rows_attended, &t.bytes_per_token,
                         &t.kept_bytes, &t.tokens_per_second}) {
      *mean /= tasks;
    }
    // Half-widths of independent tasks add in squares.
    t.low = t.mean - std::sqrt(t.low) / tasks;
    t.high = t.mean + std::sqrt(t.high) / tasks;
    t.p = sign_test(t.better, t.better + t.worse);
  }
  return totals;
}

}  // namespace

Summary summarise(std::span<const EvalRecord> records) {
  // Appearance decides the order, lengths aside.
  std::vector<Cell> cells;
  std::vector<std::string> recipes;
  std::map<Cell, std::map<std::string, std::vector<const EvalRecord*>>> groups;
  std::string full_kv;
  for (const EvalRecord& r : records) {
    const Cell cell{r.suite, r.task, r.version, r.length};
    if (!groups.contains(cell)) cells.push_back(cell);
    groups[cell][r.kv].push_back(&r);
    if (std::find(recipes.begin(), recipes.end(), r.kv) == recipes.end()) recipes.push_back(r.kv);
    if (r.label == "full") full_kv = r.kv;
  }
  std::stable_sort(cells.begin(), cells.end(),
                   [](const Cell& a, const Cell& b) { return std::get<3>(a) < std::get<3>(b); });
  // Full attention, then what measures its noise, then the rest.
  std::stable_sort(recipes.begin(), recipes.end(), [&](const std::string& a, const std::string& b) {
    const auto rank = [&](const std::string& kv) {
      return kv == full_kv ? 0 : kv.find('@') != std::string::npos ? 1 : 2;
    };
    return rank(a) < rank(b);
  });
  Summary summary;
  for (const Cell& cell : cells) {
    std::map<Prompt, const EvalRecord*> full;
    for (const EvalRecord* r : groups[cell][full_kv]) {
      if (r->skipped.empty()) full[prompt_of(*r)] = r;
    }
    for (const std::string& kv : recipes) {
      const auto& group = groups[cell][kv];
      if (!group.empty()) summary.rows.push_back(summarise_group(group, full));
    }
  }
  summary.totals = total(summary.rows);
  return summary;
}

}  // namespace longkv
