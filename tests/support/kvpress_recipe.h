// Our recipes in the conventions of kvpress's presses.
#pragma once

#include <cstdint>
#include <string>

#include "support/kvpress_golden.h"

namespace longkv::test {

// The keep stage that does what a recorded press does with n tokens; empty for a press that keeps no rows (think), that
// has no counterpart (KVzip+, KeyDiff by blocks), or of which no more is left than its window. KVzip's reads the prompt
// again, as KvpressRecord::repeat_ids says. Where the package and our defaults differ, the package's rule is asked for
// by name: averages instead of maxima over neighbours (snapkv), mass per query that could see the row and no recent
// share (h2o), no sinks (tova), the window inside of a layer's budget (pyramidkv), a guaranteed minimum per head
// instead of a blend (adakv).
std::string kvpress_keep(const KvpressRecord& record, const KvpressCut& cut, int64_t n);

}  // namespace longkv::test
