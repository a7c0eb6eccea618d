# shellcheck shell=bash
# The parts of ./check. Each run_PART function counts its checks with `one`, `suite` or `skip`; $LOG is its log.

# Programs that start threads: rebuilt for the thread sanitizer. Names of directories under tests/.
THREADED=(base engine kv_core kv_session model ops prefill)
# The reduced suite under emulation.
EMULATED=(base gguf golden kv_core kv_index kv_recipe ops prefill quant sample tokenizer)
# Tests of these names need more time than emulation or a sanitizer leaves.
SLOW='Speed|Throughput|Latency|Perplexity'

# Adds PASSED FAILED SKIPPED.
count() {
  PASSED=$((PASSED + $1)) FAILED=$((FAILED + $2)) SKIPPED=$((SKIPPED + $3))
}

# one NAME COMMAND...: a single check. Its output goes to the log.
one() {
  local name=$1
  shift
  if "$@" >>"$LOG" 2>&1; then
    count 1 0 0
  else
    say "  FAILED: $name (last lines of $LOG)"
    tail -n 15 "$LOG" | sed 's/^/    /' >&2
    count 0 1 0
    return 1
  fi
}

skip() {
  say "  skipped: $*"
  count 0 0 1
}

# build DIRECTORY TARGET... (none: all); the directory is configured already.
build() {
  local dir=$1 targets=()
  shift
  [ $# -eq 0 ] || targets=(--target "$@")
  cmake --build "$dir" -j "$JOBS" "${targets[@]}"
}

# suite DIRECTORY [CTEST_ARGUMENT...]: runs the tests of a build and counts them from ctest's own report. RUNNER, a list
# of words, goes in front of ctest.
suite() {
  local dir=$1 report=$LOGS/$PART.xml counts
  shift
  rm -f "$report"
  "${RUNNER[@]}" ctest --test-dir "$dir" -j "$JOBS" --output-on-failure --output-junit "$report" "$@" >>"$LOG" 2>&1 || true
  read -ra counts < <(python3 scripts/count_tests "$report")
  count "${counts[@]}"
}

# programs DIRECTORY...: the test programs of those directories under tests/ that exist.
programs() {
  local d
  for d in "$@"; do
    ! compgen -G "tests/$d/*_test.cc" >/dev/null || echo "test_$d"
  done
}

run_tests() {
  one "release build, configure" cmake --preset release && one "release build" build build/release && suite build/release
}

# clang's build with the address and undefined-behaviour sanitizers; the fuzz targets come from it too.
run_sanitized() {
  one "sanitized build, configure" cmake --preset fuzz && one "sanitized build" build build/fuzz &&
    suite build/fuzz -E "$SLOW"
}

run_threads() {
  local targets
  mapfile -t targets < <(programs "${THREADED[@]}")
  one "thread sanitizer build, configure" cmake --preset tsan && one "thread sanitizer build" build build/tsan "${targets[@]}" ||
    return 0
  # Address randomisation of recent kernels leaves no room for the sanitizer's shadow memory.
  local RUNNER=()
  ! setarch -R true 2>/dev/null || RUNNER=(setarch -R)
  suite build/tsan -E "_NOT_BUILT\$|$SLOW"
}

fuzz_target() {
  local name=$1 work=$LOGS/$1 seeds=()
  mkdir -p "$work/corpus"
  [ ! -d "tests/fuzz/corpus/${name%_fuzz}" ] || seeds=("tests/fuzz/corpus/${name%_fuzz}")
  build/fuzz/tests/"$name" -max_total_time="$FUZZ_SECONDS" -timeout=20 -rss_limit_mb=3072 -verbosity=1 \
    -artifact_prefix="$work/" "$work/corpus" "${seeds[@]}" >"$work/log" 2>&1
}

run_fuzz() {
  local source name pids=() names=()
  for source in tests/fuzz/*_fuzz.cc; do names+=("$(basename "$source" .cc)"); done
  one "fuzz build, configure" cmake --preset fuzz && one "fuzz build" build build/fuzz "${names[@]}" || return 0
  local i=0
  while [ $i -lt ${#names[@]} ]; do
    pids=()
    for name in "${names[@]:i:JOBS}"; do
      fuzz_target "$name" &
      pids+=("$name:$!")
    done
    for name in "${pids[@]}"; do
      if wait "${name#*:}"; then count 1 0 0; else
        say "  FAILED: ${name%:*} (see $LOGS/${name%:*}/log)"
        count 0 1 0
      fi
    done
    i=$((i + JOBS))
  done
}

# The installed library, found by a program outside the tree through CMake and through pkg-config.
run_install() {
  local prefix=$LOGS/prefix sample=examples/embed
  if [ ! -d $sample ] || [ ! -f cmake/install.cmake ]; then
    skip "no $sample or cmake/install.cmake in this tree"
    return
  fi
  rm -rf "$prefix" "$LOGS/embed"
  one "release build, configure" cmake --preset release && one "release build" build build/release &&
    one "cmake --install" cmake --install build/release --prefix "$prefix" || return 0
  one "find_package(longkv)" cmake -S $sample -B "$LOGS/embed" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" &&
    one "build with find_package" build "$LOGS/embed" &&
    one "run the sample" "$LOGS/embed/embed" models/needle-10m-128k-f16.gguf
  one "pkg-config" build_with_pkg_config "$prefix" "$sample" &&
    one "run the pkg-config sample" "$LOGS/embed-pc" models/needle-10m-128k-f16.gguf
}

build_with_pkg_config() {
  local flags
  flags=$(PKG_CONFIG_PATH=$1/lib/pkgconfig:$1/lib/x86_64-linux-gnu/pkgconfig pkg-config --cflags --libs --static longkv) || return 1
  # shellcheck disable=SC2086  # flags are words
  g++ -std=c++20 "$2"/*.cc $flags -o "$LOGS/embed-pc"
}

run_aarch64() {
  local targets
  mapfile -t targets < <(programs "${EMULATED[@]}")
  one "arm64 libraries" scripts/aarch64_sysroot &&
    one "Arm build, configure" cmake -S . -B build/aarch64 -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_TOOLCHAIN_FILE="$ROOT/cmake/aarch64.cmake" -DLONGKV_WITH_ONEDNN=OFF &&
    one "Arm build" build build/aarch64 "${targets[@]}" && suite build/aarch64 -E "_NOT_BUILT\$|$SLOW"
}

run_format() {
  local files
  mapfile -t files < <(git ls-files '*.cc' '*.h')
  one "clang-format" clang-format --dry-run -Werror "${files[@]}"
}

# clang-tidy over the files of the library and the program that changed since the last merge point; all of them takes
# far longer than everything else (CHECK_TIDY=all does it).
run_tidy() {
  local base files
  base=$(git merge-base HEAD "${CHECK_TIDY_BASE:-origin/HEAD}" 2>/dev/null || git rev-parse HEAD~1 2>/dev/null || true)
  if [ "${CHECK_TIDY:-}" = all ] || [ -z "$base" ]; then
    mapfile -t files < <(git ls-files 'src/*.cc' 'apps/*.cc')
  else
    mapfile -t files < <(git diff --name-only --diff-filter=d "$base" -- 'src/*.cc' 'apps/*.cc')
  fi
  if [ ${#files[@]} -eq 0 ]; then
    skip "no source file changed since ${base:0:12}"
    return
  fi
  one "compile commands" cmake --preset fuzz || return 0
  one "clang-tidy, ${#files[@]} files" tidy_files "${files[@]}"
}

tidy_files() {
  local out=$LOGS/tidy.findings rc=0 seconds=${CHECK_TIDY_SECONDS:-150}
  printf '%s\n' "$@" | timeout "$seconds" xargs -P "$JOBS" -n 1 clang-tidy -p build/fuzz --quiet --warnings-as-errors='*' \
    >"$out" 2>/dev/null || rc=$?
  cat "$out"
  ! grep -q 'error:' "$out" || return 1
  [ $rc -ne 124 ] || { say "  clang-tidy: stopped after $seconds s, nothing found so far (CHECK_TIDY_SECONDS)"; return 0; }
  return $rc
}
