// The merge loop of byte-pair encoding: repeatedly joins the adjacent pair of best priority, leftmost first.
//
// Three ways with the same result, chosen by length: scanning a short word; a heap of pairs, O(n log n); for very long
// words (a text without spaces, one repeated character) one list per priority, which reads memory in order and stays
// linear as long as a merge never makes a pair that is better than itself, as holds for trained vocabularies. When a
// pair breaks that rule, the loop goes on with the heap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <string_view>
#include <vector>

namespace longkv {

constexpr uint32_t kNoPair = std::numeric_limits<uint32_t>::max();

// What joining two neighbours gives: lower priority values go first.
struct PairMerge {
  uint32_t priority = kNoPair;
  int32_t symbol = -1;
};

// Buffers are kept between words; one Merger serves one thread.
template <class PairTable>
class Merger {
 public:
  // PairTable: PairMerge merge(int32_t left, int32_t right, std::string_view joined_bytes) const;
  //            size_t priority_count() const;   all priorities are below it
  explicit Merger(const PairTable& table) : table_(table) {}

  // `symbols` and `lengths` describe the word's first split (lengths in bytes, sum = word.size() < 2^31).
  // On return they hold the merged symbols in order. A symbol of -1 is unknown and is left as it is unless it merges.
  void run(std::string_view word, std::vector<int32_t>& symbols, std::vector<int32_t>& lengths) {
    if (symbols.size() <= kShort) {
      run_short(word, symbols, lengths);
    } else {
      run_long(word, symbols, lengths);
    }
  }

 private:
  static constexpr size_t kShort = 48;
  static constexpr size_t kListsFrom = size_t{1} << 16;

  // State of one byte position where a symbol may begin.
  struct Node {
    int32_t symbol = -1;
    int32_t length = 0;  // of the symbol that begins here
    int32_t back = 0;    // length of the symbol that ends here
    PairMerge pair;      // of this symbol with the next; kNoPair when there is none or no symbol begins here
  };

  void run_short(std::string_view word, std::vector<int32_t>& symbols, std::vector<int32_t>& lengths) {
    size_t n = symbols.size();
    PairMerge pairs[kShort];
    size_t begins[kShort];
    size_t begin = 0;
    for (size_t i = 0; i < n; ++i) {
      begins[i] = begin;
      begin += static_cast<size_t>(lengths[i]);
    }
    const auto pair_at = [&](size_t i) {
      return table_.merge(
          symbols[i], symbols[i + 1],
          word.substr(begins[i], static_cast<size_t>(lengths[i]) + static_cast<size_t>(lengths[i + 1])));
    };
    for (size_t i = 0; i + 1 < n; ++i) pairs[i] = pair_at(i);
    while (n > 1) {
      size_t best = 0;
      for (size_t i = 1; i + 1 < n; ++i) {
        if (pairs[i].priority < pairs[best].priority) best = i;
      }
      if (pairs[best].priority == kNoPair) break;
      symbols[best] = pairs[best].symbol;
      lengths[best] += lengths[best + 1];
      --n;
      for (size_t i = best + 1; i < n; ++i) {
        symbols[i] = symbols[i + 1];
        lengths[i] = lengths[i + 1];
        begins[i] = begins[i + 1];
        pairs[i] = pairs[i + 1];
      }
      if (best + 1 < n) pairs[best] = pair_at(best);
      if (best > 0) pairs[best - 1] = pair_at(best - 1);
    }
    symbols.resize(n);
    lengths.resize(n);
  }

  void run_long(std::string_view word, std::vector<int32_t>& symbols, std::vector<int32_t>& lengths) {
    word_ = word;
    nodes_.assign(word.size() + 1, Node{});
    size_t pos = 0;
    for (size_t i = 0; i < symbols.size(); ++i) {
      nodes_[pos].symbol = symbols[i];
      nodes_[pos].length = lengths[i];
      pos += static_cast<size_t>(lengths[i]);
      nodes_[pos].back = lengths[i];
    }
    for (pos = 0; pos < word.size(); pos += length_at(pos)) renew_pair(pos);
    if (word.size() < kListsFrom || !run_lists()) run_heap();
    symbols.clear();
    lengths.clear();
    for (pos = 0; pos < word.size(); pos += length_at(pos)) {
      symbols.push_back(nodes_[pos].symbol);
      lengths.push_back(nodes_[pos].length);
    }
    if (nodes_.capacity() > kListsFrom) nodes_ = {};
  }

  size_t length_at(size_t pos) const { return static_cast<size_t>(nodes_[pos].length); }

  void renew_pair(size_t pos) {
    Node& node = nodes_[pos];
    const size_t next = pos + static_cast<size_t>(node.length);
    node.pair = next >= word_.size() ? PairMerge{}
                                     : table_.merge(node.symbol, nodes_[next].symbol,
                                                    word_.substr(pos, length_at(pos) + length_at(next)));
  }

  // Joins the pair that begins at pos and reports the pairs that come of it.
  template <class OnPair>
  void join(size_t pos, OnPair on_pair) {
    Node& node = nodes_[pos];
    Node& right = nodes_[pos + length_at(pos)];
    node.symbol = node.pair.symbol;
    node.length += right.length;
    right.pair = {};
    nodes_[pos + length_at(pos)].back = node.length;
    renew_pair(pos);
    if (node.pair.priority != kNoPair) on_pair(pos, node.pair.priority);
    if (pos > 0) {
      const size_t before = pos - static_cast<size_t>(node.back);
      renew_pair(before);
      if (nodes_[before].pair.priority != kNoPair) on_pair(before, nodes_[before].pair.priority);
    }
  }

  // Entries are priority << 32 | position. An entry whose position has another pair by now is stale.
  void run_heap() {
    std::vector<uint64_t> entries;
    for (size_t pos = 0; pos < word_.size(); pos += length_at(pos)) {
      if (nodes_[pos].pair.priority != kNoPair) entries.push_back(uint64_t{nodes_[pos].pair.priority} << 32 | pos);
    }
    std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap({}, std::move(entries));
    while (!heap.empty()) {
      const uint64_t top = heap.top();
      heap.pop();
      const size_t pos = top & 0xFFFFFFFFu;
      if (nodes_[pos].pair.priority != top >> 32) continue;
      join(pos, [&](size_t at, uint32_t priority) { heap.push(uint64_t{priority} << 32 | at); });
    }
  }

  // False when a merge made a pair that should have gone before it; the nodes are then consistent for run_heap().
  bool run_lists() {
    std::vector<std::vector<int32_t>> lists(table_.priority_count());
    std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> filled;
    const auto add = [&](size_t pos, uint32_t priority) {
      if (lists[priority].empty()) filled.push(priority);
      lists[priority].push_back(static_cast<int32_t>(pos));
    };
    for (size_t pos = 0; pos < word_.size(); pos += length_at(pos)) {
      if (nodes_[pos].pair.priority != kNoPair) add(pos, nodes_[pos].pair.priority);
    }
    while (!filled.empty()) {
      const uint32_t priority = filled.top();
      filled.pop();
      std::vector<int32_t> list = std::move(lists[priority]);
      lists[priority] = {};
      if (!std::is_sorted(list.begin(), list.end())) std::sort(list.begin(), list.end());
      bool in_order = true;
      for (const int32_t at : list) {
        const auto pos = static_cast<size_t>(at);
        if (nodes_[pos].pair.priority != priority) continue;
        join(pos, [&](size_t made_at, uint32_t made) {
          if (made <= priority) in_order = false;
          add(made_at, made);
        });
        if (!in_order) return false;
      }
    }
    return true;
  }

  const PairTable& table_;
  std::string_view word_;
  std::vector<Node> nodes_;
};

}  // namespace longkv
