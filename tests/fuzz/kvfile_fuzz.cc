// KV files: whatever the bytes, opening and restoring return, and what was
// restored can be gone on from. Sums are made to match first, so that what lies
// behind them is reached.
#include "tests/fuzz/kvfile_case.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  longkv::test::try_kv_file(data, size);
  return 0;
}
