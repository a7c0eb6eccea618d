// What this CPU can do and which instruction-set level longkv uses.
//
// Float kernels are written once over Google Highway, which compiles them for several targets. Int8 and bf16 products,
// which Debian's Highway cannot express, live in one small file per level. Both are steered by one level, detected at
// start, lowered by --isa or LONGKV_ISA, and printed by `longkv version`.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longkv/status.h"

namespace longkv {

// Ordered: a CPU that has a level has all lower ones of its architecture.
enum class IsaLevel {
  kBase = 0,        // portable C++ for integer kernels, Highway's baseline (SSE2-class, scalar) for float ones
  kAvx2 = 1,        // AVX2, FMA, F16C
  kAvx512 = 2,      // AVX-512 F, BW, DQ, VL, CD
  kAvx512Vnni = 3,  // + int8 dot products
  kAvx512Bf16 = 4,  // + bf16 dot products
  kAmx = 5,         // + AMX int8 and bf16 tiles, enabled by the kernel for this process
  kNeon = 16,       // Armv8 NEON
  kNeonDot = 17,    // + SDOT
};

const char* isa_name(IsaLevel level);
std::optional<IsaLevel> parse_isa(std::string_view name);

// Levels this build has code for and this CPU can run, ascending; never empty.
const std::vector<IsaLevel>& available_isa_levels();

// The level that kernels use now: the highest available one unless it was set.
IsaLevel active_isa();

// Selects a level for the whole process, including Highway's dispatch. Not to be called while kernels run.
// Errors: kInvalidArgument when the CPU lacks it; the message lists those it has.
Status set_active_isa(IsaLevel level);

std::string cpu_model_name();
// Physical cores of one NUMA node, the default thread count; at least 1.
int default_threads();
// Bytes of all last-level caches that this machine shows; 0 if unknown.
long last_level_cache_bytes();

}  // namespace longkv
