#include "base/cpu.h"

#include <hwy/highway.h>
#include <hwy/targets.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace longkv {

namespace {

#if defined(__x86_64__)
// The kernel grants AMX tile state per process on request (arch_prctl ARCH_REQ_XCOMP_PERM).
bool request_amx_permission() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureTileData = 18;
  return ::syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

// GCC 12's __builtin_cpu_supports knows no AMX, so the bits of CPUID leaf 7 are read directly.
bool cpuid_has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  return (d & (kBf16 | kTile | kInt8)) == (kBf16 | kTile | kInt8);
}

// Clang 14's __builtin_cpu_supports knows no F16C.
bool cpuid_has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kF16c = 1u << 29;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & kF16c) != 0;
}
#endif

std::vector<IsaLevel> detect() {
  std::vector<IsaLevel> levels{IsaLevel::kBase};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && cpuid_has_f16c();
  if (!avx2) return levels;
  levels.push_back(IsaLevel::kAvx2);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (!avx512) return levels;
  levels.push_back(IsaLevel::kAvx512);
  if (!__builtin_cpu_supports("avx512vnni")) return levels;
  levels.push_back(IsaLevel::kAvx512Vnni);
  if (!__builtin_cpu_supports("avx512bf16")) return levels;
  levels.push_back(IsaLevel::kAvx512Bf16);
  if (cpuid_has_amx() && request_amx_permission()) levels.push_back(IsaLevel::kAmx);
#elif defined(__aarch64__)
  levels.push_back(IsaLevel::kNeon);
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) levels.push_back(IsaLevel::kNeonDot);
#endif
  return levels;
}

constexpr std::pair<IsaLevel, const char*> kNames[] = {
    {IsaLevel::kBase, "base"},
    {IsaLevel::kAvx2, "avx2"},
    {IsaLevel::kAvx512, "avx512"},
    {IsaLevel::kAvx512Vnni, "avx512vnni"},
    {IsaLevel::kAvx512Bf16, "avx512bf16"},
    {IsaLevel::kAmx, "amx"},
    {IsaLevel::kNeon, "neon"},
    {IsaLevel::kNeonDot, "neondot"},
};

std::atomic<IsaLevel>& active() {
  static std::atomic<IsaLevel> level{available_isa_levels().back()};
  return level;
}

std::string read_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace

const char* isa_name(IsaLevel level) {
  for (const auto& [l, name] : kNames) {
    if (l == level) return name;
  }
  return "unknown";
}

std::optional<IsaLevel> parse_isa(std::string_view name) {
  for (const auto& [level, n] : kNames) {
    if (name == n) return level;
  }
  return std::nullopt;
}

const std::vector<IsaLevel>& available_isa_levels() {
  static const std::vector<IsaLevel> levels = detect();
  return levels;
}

IsaLevel active_isa() { return active().load(std::memory_order_relaxed); }

Status set_active_isa(IsaLevel level) {
  bool found = false;
  std::string have;
  for (IsaLevel l : available_isa_levels()) {
    found |= l == level;
    have += have.empty() ? "" : ", ";
    have += isa_name(l);
  }
  if (!found) {
    return fail(Code::kInvalidArgument, "this CPU or build has no instruction-set level '{}'; it has: {}",
                isa_name(level), have);
  }
  // Highway knows fewer levels than we do: switch off its targets above ours.
  int64_t disabled = 0;
#if defined(__x86_64__)
  if (level < IsaLevel::kAvx512) disabled |= HWY_AVX3 | HWY_AVX3_DL;
  if (level < IsaLevel::kAvx2) disabled |= HWY_AVX2;
#endif
  hwy::DisableTargets(disabled);
  // Chosen here: the first dispatch after DisableTargets() looks for targets anew and for a moment lets other threads
  // have those that are off, whose bits differ.
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  active().store(level, std::memory_order_relaxed);
  return {};
}

std::string cpu_model_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("model name", 0) == 0) {
      const auto colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  }
  return "unknown CPU";
}

int default_threads() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    const unsigned n = std::thread::hardware_concurrency();
    return n > 0 ? int(n) : 1;
  }
  // NUMA nodes are read from the node list, not from sockets: virtual machines often show one socket per core.
  std::set<std::string> cores;  // each physical core once, named by its list of hardware threads
  std::string first_node;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
    std::string node = "0";
    for (int n = 0; n < 64; ++n) {
      if (::access((dir + "/node" + std::to_string(n)).c_str(), F_OK) == 0) node = std::to_string(n);
    }
    if (first_node.empty()) first_node = node;
    if (node != first_node) continue;
    const std::string siblings = read_line(dir + "/topology/thread_siblings_list");
    cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
  }
  return cores.empty() ? 1 : int(cores.size());
}

namespace {

// The third-level caches that Linux shows, summed over those that are not shared; 0 where it shows none. A virtual
// machine often has a part of the chip, while sysconf() counts all of it.
long shown_l3_bytes() {
  long total = 0;
  std::set<std::string> counted;
  for (int cpu = 0;; ++cpu) {
    const std::string directory = fmt::format("/sys/devices/system/cpu/cpu{}/cache/index3/", cpu);
    std::ifstream size(directory + "size"), shared(directory + "shared_cpu_list");
    long kib = 0;
    std::string cpus;
    if (!(size >> kib) || !(shared >> cpus)) return total;
    if (counted.insert(cpus).second) total += kib * 1024;
  }
}

}  // namespace

long last_level_cache_bytes() {
  if (const long shown = shown_l3_bytes(); shown > 0) return shown;
  const long l3 = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (l3 > 0) return l3;
  const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  return l2 > 0 ? l2 : 0;
}

}  // namespace longkv
