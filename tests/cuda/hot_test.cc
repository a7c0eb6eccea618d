// Rows in memory, blocks on the card: the kernels between them.
#include "cuda/hot.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/threads.h"
#include "cuda/card.h"

namespace longkv {
namespace {

using card::BlockStore;
using card::CardKv;
using test::OnCard;

SharedRows shared_rows(int64_t bytes) {
  ThreadPool pool(2);
  return SharedRows::create(bytes, "rows of a test", pool).value();
}

struct Case {
  KvType type;
  int kv_heads, dim, block;
  int64_t rows;
};
const Case kCases[] = {{KvType::kF16, 2, 64, 16, 1000},  {KvType::kQ8_0, 8, 128, 16, 3003},
                       {KvType::kQ8_0, 1, 256, 32, 517}, {KvType::kQ4_0, 8, 128, 16, 2003},
                       {KvType::kQ4_0, 2, 96, 32, 517},  {KvType::kFp8, 8, 128, 16, 2003},
                       {KvType::kFp8, 3, 64, 32, 517},   {KvType::kF16, 3, 128, 128, 1500}};

// Rows go to memory in pieces that begin anywhere, and come back as they read.
TEST(CardHot, RowsToMemoryAndBack) {
  LONGKV_NEED_CARD();
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message() << kv_type_name(c.type) << ", " << c.kv_heads << " x " << c.dim);
    const int64_t capacity = (c.rows + 15) / 16 * 16, blocks = (c.rows + c.block - 1) / c.block;
    const OnCard memory(card::card_kv_bytes(c.type, c.kv_heads, c.dim, capacity));
    const CardKv kv = card::place_kv(c.type, c.kv_heads, c.dim, capacity, memory.data());
    ASSERT_DONE(card::fill_rows(kv, c.rows, 9, nullptr));
    BlockStore store = card::place_store(c.type, c.kv_heads, c.dim, c.block, blocks, nullptr);
    const SharedRows rows = shared_rows(card::store_bytes(store));
    store.data = rows.on_card();
    for (int64_t first = 0, n = 1; first < c.rows; first += n, n = std::min(n * 3 + 1, c.rows - first))
      ASSERT_DONE(card::spill_rows(kv, store, first, n, nullptr));
    const int64_t halves = card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, capacity);
    const OnCard back(halves), want(halves);
    ASSERT_DONE(card::bring_rows(store, c.rows, card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, back.data()),
                                 nullptr));
    ASSERT_DONE(card::decode_rows(kv, 0, c.rows, card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, want.data()),
                                  nullptr));
    EXPECT_EQ(back.read<uint16_t>(halves / 2), want.read<uint16_t>(halves / 2));
  }
}

// The rule in plain words: blocks that are not there take free slots first (by number), then those used longest ago.
struct Model {
  std::vector<int> block_of, used;
  std::map<int, int> slot_of;
  int64_t found = 0, fetched = 0;
  explicit Model(int64_t slots) : block_of(size_t(slots), -1), used(size_t(slots), -1) {}
  void step(const std::vector<int>& wanted, int now) {
    std::vector<int> missing;
    for (int b : wanted) {
      if (slot_of.contains(b)) {
        used[size_t(slot_of[b])] = now;
        ++found;
      } else {
        missing.push_back(b);
      }
    }
    std::vector<int> order;
    for (int s = 0; s < int(used.size()); ++s) order.push_back(s);
    const auto age = [&](int s) { return used[size_t(s)] < 0 ? 255 : std::min(now - used[size_t(s)], 254); };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return age(a) > age(b); });
    order.resize(missing.size());
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < missing.size(); ++i) {
      const int s = order[i];
      if (block_of[size_t(s)] >= 0) slot_of.erase(block_of[size_t(s)]);
      block_of[size_t(s)] = missing[i];
      slot_of[missing[i]] = s;
      used[size_t(s)] = now;
      ++fetched;
    }
  }
};

TEST(CardHot, BlocksComeAndGo) {
  LONGKV_NEED_CARD();
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message() << kv_type_name(c.type) << ", " << c.kv_heads << " x " << c.dim);
    const int64_t capacity = (c.rows + 15) / 16 * 16, blocks = (c.rows + c.block - 1) / c.block;
    const int per_block = c.block / 16;
    const int64_t most = std::max<int64_t>(2, blocks / 4), slots = most + 4, stride = most * per_block + 3;
    const OnCard memory(card::card_kv_bytes(c.type, c.kv_heads, c.dim, capacity));
    const CardKv kv = card::place_kv(c.type, c.kv_heads, c.dim, capacity, memory.data());
    ASSERT_DONE(card::fill_rows(kv, c.rows, 10, nullptr));
    BlockStore store = card::place_store(c.type, c.kv_heads, c.dim, c.block, blocks, nullptr);
    const SharedRows rows = shared_rows(card::store_bytes(store));
    store.data = rows.on_card();
    ASSERT_DONE(card::spill_rows(kv, store, 0, c.rows, nullptr));

    const int64_t pool_bytes = card::card_kv_bytes(c.type, c.kv_heads, c.dim, slots * c.block);
    const OnCard pool(pool_bytes), tables(c.kv_heads * (blocks + slots * 4 + 1) * 4 + 4), totals(16);
    card::HotBlocks hot;
    hot.pool = card::place_kv(c.type, c.kv_heads, c.dim, slots * c.block, pool.data());
    hot.slots = slots;
    hot.slot_of = tables.as<int32_t>();  // all -1, as OnCard leaves it
    hot.block_of = hot.slot_of + c.kv_heads * blocks;
    hot.used = hot.block_of + c.kv_heads * slots;
    hot.missing = hot.used + c.kv_heads * slots + c.kv_heads * blocks % 2;  // pairs
    hot.count = hot.missing + c.kv_heads * slots * 2;
    hot.totals = totals.as<unsigned long long>();
    OnCard::check(cudaMemset(totals.data(), 0, 16));
    std::vector<Model> models(size_t(c.kv_heads), Model(slots));
    std::mt19937 random(3);

    for (int step = 0; step < 300; step += 1 + step / 40) {
      std::vector<int32_t> list(size_t(c.kv_heads * stride * 2), 0), count(size_t(c.kv_heads), 0);
      std::vector<std::vector<std::pair<int64_t, int>>> wanted(size_t(c.kv_heads));  // row, rows
      for (int h = 0; h < c.kv_heads; ++h) {
        std::set<int> chosen;
        const auto n = size_t(1 + random() % uint32_t(most));
        // Mostly the same blocks, so that some are found.
        while (chosen.size() < n)
          chosen.insert(int(random() % uint32_t(random() % 4 == 0 ? blocks : std::min(blocks, 2 * most))));
        models[size_t(h)].step(std::vector<int>(chosen.begin(), chosen.end()), step);
        for (int b : chosen) {
          for (int t = 0; t < per_block; ++t) {
            const int row = b * c.block + 16 * t + int(t == 0 && step % 2 == 1 ? 3 : 0);
            const int end = std::min<int>(int(c.rows), b * c.block + 16 * t + 16);
            wanted[size_t(h)].emplace_back(row, std::max(0, end - row));
          }
        }
        count[size_t(h)] = int32_t(wanted[size_t(h)].size());
        for (size_t i = 0; i < wanted[size_t(h)].size(); ++i) {
          list[(size_t(h) * size_t(stride) + i) * 2] = int32_t(wanted[size_t(h)][i].first);
          list[(size_t(h) * size_t(stride) + i) * 2 + 1] = wanted[size_t(h)][i].second;
        }
      }
      const std::vector<int64_t> now = {step};
      const OnCard tiles = OnCard::of(list), counts = OnCard::of(count), at = OnCard::of(now);
      ASSERT_DONE(
          card::place_blocks(store, hot, tiles.as<int32_t>(), counts.as<int32_t>(), stride, at.as<int64_t>(), nullptr));
      ASSERT_DONE(card::fetch_blocks(store, hot, nullptr));
      const auto placed = tiles.read<int32_t>(int64_t(list.size()));
      for (int h = 0; h < c.kv_heads; ++h) {
        for (size_t i = 0; i < wanted[size_t(h)].size(); ++i) {
          const auto [row, n] = wanted[size_t(h)][i];
          const int32_t* tile = &placed[(size_t(h) * size_t(stride) + i) * 2];
          ASSERT_EQ(tile[1], n);
          ASSERT_EQ(tile[0], models[size_t(h)].slot_of.at(int(row / c.block)) * c.block + int(row % c.block))
              << "step " << step << ", head " << h << ", tile " << i;
        }
      }
    }
    int64_t found = 0, fetched = 0;
    for (const Model& m : models) found += m.found, fetched += m.fetched;
    const auto counted = totals.read<uint64_t>(2);
    EXPECT_EQ(int64_t(counted[0]), found);
    EXPECT_EQ(int64_t(counted[1]), fetched);
    EXPECT_GT(found, 0);

    // Every block on the card holds what memory holds.
    const auto on_card = pool.read<uint8_t>(pool_bytes);
    const auto offset = [&](const void* p) { return static_cast<const uint8_t*>(p) - pool.data(); };
    for (int h = 0; h < c.kv_heads; ++h) {
      for (const auto& [b, s] : models[size_t(h)].slot_of) {
        const uint8_t* record = rows.host() + (h * blocks + b) * store.record;
        const int64_t slot = h * slots + s;
        ASSERT_EQ(std::memcmp(record, &on_card[size_t(offset(hot.pool.k) + slot * store.plane)], size_t(store.plane)),
                  0);
        ASSERT_EQ(std::memcmp(record + store.plane, &on_card[size_t(offset(hot.pool.v) + slot * store.plane)],
                              size_t(store.plane)),
                  0);
        if (store.scales == 0) continue;
        record += 2 * store.plane;
        ASSERT_EQ(
            std::memcmp(record, &on_card[size_t(offset(hot.pool.k_scale) + slot * store.scales)], size_t(store.scales)),
            0);
        ASSERT_EQ(std::memcmp(record + store.scales, &on_card[size_t(offset(hot.pool.v_scale) + slot * store.scales)],
                              size_t(store.scales)),
                  0);
      }
    }
  }
}

}  // namespace
}  // namespace longkv
