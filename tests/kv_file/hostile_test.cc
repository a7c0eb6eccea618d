// Files that were made to harm: any number of any small segment is changed and
// all sums are made to match. Nothing may reach outside of what it belongs to
// (the address sanitizer looks), whether the file is refused or taken.
#include <filesystem>
#include <fstream>

#include "kv_file/harness.h"
#include "tests/fuzz/kvfile_case.h"

namespace longkv {
namespace {

constexpr int kChanges = 60;  // per seed

TEST(HostileKvFile, ChangedNumbersAreRefusedOrHarmless) {
  int64_t refused = 0, taken = 0, seeds = 0;
  std::mt19937_64 rng(5);
  for (const auto& seed : std::filesystem::directory_iterator(std::string(LONGKV_TEST_DIR) + "/fuzz/corpus/kvfile")) {
    const std::string bytes = test::file_bytes(seed.path().string());
    const std::vector<uint8_t> original(bytes.begin(), bytes.end());
    ASSERT_EQ(test::try_kv_file(original.data(), original.size()), 1) << seed.path();
    ++seeds;
    const auto file = *KvFile::open(seed.path().string());
    std::vector<KvEntry> small;
    for (const KvFile::Segment& s : file->segments()) {
      const bool skip = s.name == "fingerprint" || s.name == "tokens" || s.name == "logits" || s.entry.size == 0;
      if (s.entry.kind == uint16_t(KvSegmentKind::kValues) && s.entry.encoding == 0 && !skip) small.push_back(s.entry);
    }
    for (int i = 0; i < kChanges; ++i) {
      std::vector<uint8_t> changed = original;
      for (uint64_t n = 1 + rng() % 2; n > 0; --n) {
        const KvEntry& e = small[rng() % small.size()];
        const uint64_t at = e.offset + rng() % e.stored;
        static constexpr int64_t kEdges[] = {-1, 0, 1, 31, 65, 1 << 20, INT64_MAX, INT64_MIN};
        if (rng() % 2 == 0 && e.stored >= 8) {
          const int64_t value = kEdges[rng() % std::size(kEdges)];
          std::memcpy(changed.data() + e.offset + rng() % (e.stored / 8) * 8, &value, sizeof(value));
        } else {
          changed[at] = uint8_t(rng());
        }
      }
      (test::try_kv_file(changed.data(), changed.size()) == 1 ? taken : refused) += 1;
    }
    // The directory too: sizes, offsets, names.
    for (int i = 0; i < kChanges / 2; ++i) {
      std::vector<uint8_t> changed = original;
      const auto footer = test::get_at<KvFileFooter>(changed, changed.size() - sizeof(KvFileFooter));
      changed[footer.directory_offset + rng() % (footer.directory_bytes + 60)] ^= uint8_t(1 << rng() % 8);
      (test::try_kv_file(changed.data(), changed.size()) == 1 ? taken : refused) += 1;
    }
  }
  EXPECT_GE(seeds, 20);
  EXPECT_GT(refused, seeds * kChanges / 4);
  EXPECT_GT(taken, 0);
}

}  // namespace
}  // namespace longkv
