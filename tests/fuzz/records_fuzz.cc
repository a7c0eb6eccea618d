// Users' data files: lines of JSON, arrays of objects, CSV. Any bytes give records or a message.
#include <algorithm>
#include <cstring>
#include <string>

#include "eval/data/csv_reader.h"
#include "eval/data/datasets.h"

namespace {

class MemorySource : public longkv::ByteSource {
 public:
  MemorySource(const uint8_t* bytes, size_t size) : bytes_(bytes), size_(size) {}
  longkv::Result<size_t> read(char* bytes, size_t size) override {
    // Small pieces, so that every border of the reader's buffer is met.
    const size_t n = std::min({size, size_ - at_, size_t(7)});
    std::memcpy(bytes, bytes_ + at_, n);
    at_ += n;
    return n;
  }

 private:
  const uint8_t* bytes_;
  size_t size_, at_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longkv;
  if (size < 1) return 0;
  auto source = std::make_unique<MemorySource>(data + 1, size - 1);
  if ((data[0] & 1) != 0) {
    CsvReader reader(std::move(source), "fuzz");
    for (auto record = reader.next(); record.ok() && *record; record = reader.next()) {
    }
    return 0;
  }
  static const RecordAdapter adapters[] = {ruler_adapter(),         longbench_adapter({}, {}), longbench2_adapter(),
                                           infinitebench_adapter(), gsm_infinite_adapter(),    kvpress_adapter()};
  static const char* const tasks[] = {"vt", "trec", "data", "code_debug", "ops_3", "t"};
  const size_t which = (data[0] >> 1) % std::size(adapters);
  RecordReader reader(std::move(source), "fuzz");
  for (auto record = reader.next(); record.ok() && *record; record = reader.next()) {
    (void)adapters[which](**record, tasks[which]);
  }
  return 0;
}
