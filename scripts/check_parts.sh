# shellcheck shell=bash
# The parts of ./check. Each run_PART function counts its checks with `one`, `suite` or `skip`; $LOG is its log.

# Programs that start threads: rebuilt for the thread sanitizer. Names of directories under tests/.
THREADED=(base engine eval grad kv_core kv_file kv_keep kv_session model ops prefill server train)
# The reduced suite under emulation.
EMULATED=(base gguf golden kv_core kv_index kv_recipe ops prefill quant sample tokenizer)
# Tests of these names need more time than emulation or a sanitizer leaves: real models at length, and a bound on the
# tokenizers' speed.
SLOW='^Speed\.|LongNeedle|GoldenModel.*/(smollm2|needle_10m|gemma3_270m)|_NOT_BUILT$'
# Real models again, in tests that bound the time of the programs that they start, and long lessons: the release tests run them.
REAL='CliEval\.(AFullDisk|JobsChange|AKilled|PromptsAre)|CliTrain\.(AMask|ALoss|AStopped|Gates|NoRoom)|Trainer\.(LearnedChannels|AStopped)|RealModel|Kvpress.*[Ss]mol|AModelAnswers|Serve\.EveryKind|Clients\.'
# Under the thread sanitizer a real model needs ten minutes for these, or longer than their clients wait; one starts a
# program that the part does not build.
LONG='Trainer\.BudgetsAreKept|SchedulerTest\.(CancelledWherever|AnAnswerGoesOn)|Streams\.(AClientThatLeaves|TokensCome|SilenceIs)|OpenCompassAdapter'
# Comparisons of kernels with slow references, and their portable level: threads share their work in them as in the tests
# of equal bits beside them, which the thread sanitizer keeps.
NUMERIC='Double|EqualReference|EqualsReference|ChannelsAndHeads|EveryChunking|EveryTokenCount$|/base'

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

# build DIRECTORY TARGET... (none: all); the directory is configured already. RUNNER, a list of words, goes in front,
# since building a test program runs it for the names of its tests.
build() {
  local dir=$1 targets=()
  shift
  [ $# -eq 0 ] || targets=(--target "$@")
  "${RUNNER[@]}" cmake --build "$dir" -j "$JOBS" "${targets[@]}"
}

# suite DIRECTORY [CTEST_ARGUMENT...]: runs the tests of a build and counts them from ctest's own report. RUNNER goes
# in front of ctest.
suite() {
  local dir=$1 report=$LOGS/$PART.xml counts
  shift
  rm -f "$report"
  "${RUNNER[@]}" ctest --test-dir "$dir" -j "$JOBS" --output-on-failure --output-junit "$report" "$@" >>"$LOG" 2>&1 || true
  read -ra counts < <(python3 scripts/count_tests "$report")
  count "${counts[@]}"
}

# most DIRECTORY [REGEX]: its suite without the slow tests and without those that REGEX names; says how many it left out.
most() {
  local left without=$SLOW${2:+|$2}
  left=$(ctest --test-dir "$1" -N -R "$without" | sed -n 's/^ *Test *#[0-9]*: *\([^ ]*\).*/\1/p' | grep -vc '_NOT_BUILT$' || true)
  say "  left out: $left tests that need optimised code (part tests runs them)"
  suite "$1" -E "$without"
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

# The address and undefined-behaviour sanitizers.
run_sanitized() {
  # Frames with guards around them are several times as large; the deepest templates would need more than 8 MiB.
  local RUNNER=(prlimit --stack=67108864)
  one "sanitized build, configure" cmake --preset asan && one "sanitized build" build build/asan &&
    most build/asan "$REAL"
}

run_threads() {
  local targets
  mapfile -t targets < <(programs "${THREADED[@]}")
  # Address randomisation of recent kernels leaves no room for the sanitizer's shadow memory.
  local RUNNER=()
  ! setarch -R true 2>/dev/null || RUNNER=(setarch -R)
  one "thread sanitizer build, configure" cmake --preset tsan &&
    one "thread sanitizer build" build build/tsan "${targets[@]}" || return 0
  TSAN_OPTIONS="suppressions=$ROOT/tests/tsan_suppressions.txt ${TSAN_OPTIONS:-}" most build/tsan "$NUMERIC|$REAL|$LONG"
}

fuzz_target() {
  local name=$1 work=$LOGS/$1 seeds=()
  mkdir -p "$work/corpus"
  [ ! -d "tests/fuzz/corpus/${name%_fuzz}" ] || seeds=("tests/fuzz/corpus/${name%_fuzz}")
  prlimit --stack=67108864 build/fuzz/tests/"$name" -max_total_time="$FUZZ_SECONDS" -timeout=20 -rss_limit_mb=3072 -verbosity=1 \
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
  local prefix=$LOGS/prefix source=tests/consumer model=models/needle-10m-128k-f16.gguf
  rm -rf "$prefix" "$LOGS/consumer" "$LOGS/consumer-pc"
  one "release build, configure" cmake --preset release && one "release build" build build/release longkv longkv_cli &&
    one "cmake --install" cmake --install build/release --prefix "$prefix" || return 0
  one "the installed program" "$prefix/bin/longkv" version
  one "find_package(longkv)" cmake -S $source -B "$LOGS/consumer" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" &&
    one "build with find_package" build "$LOGS/consumer" && one "run it" "$LOGS/consumer/consumer" $model
  one "build with pkg-config" build_with_pkg_config "$prefix" "$source/main.cc" &&
    one "run it" "$LOGS/consumer-pc" $model
}

build_with_pkg_config() {
  local flags
  flags=$(PKG_CONFIG_PATH=$(dirname "$(find "$1" -name longkv.pc)") pkg-config --cflags --libs longkv) || return 1
  # shellcheck disable=SC2086  # flags are words
  g++ "$2" $flags -o "$LOGS/consumer-pc"
}

run_aarch64() {
  local targets
  mapfile -t targets < <(programs "${EMULATED[@]}")
  one "arm64 libraries" scripts/aarch64_sysroot &&
    one "Arm build, configure" cmake -S . -B build/aarch64 -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_TOOLCHAIN_FILE="$ROOT/cmake/aarch64.cmake" -DLONGKV_WITH_ONEDNN=OFF &&
    one "Arm build" build build/aarch64 "${targets[@]}" && most build/aarch64
}

run_format() {
  local files
  mapfile -t files < <(git ls-files '*.cc' '*.h')
  one "clang-format" clang-format --dry-run -Werror "${files[@]}"
}

# clang-tidy over the sources of the library and the program, as many as the time allows: those that differ from the
# main branch first, then by name. CHECK_TIDY=all takes every file, which is longer than everything else.
run_tidy() {
  local base files
  base=$(git merge-base HEAD origin/HEAD 2>/dev/null || git rev-parse HEAD)
  mapfile -t files < <({
    git diff --name-only --diff-filter=d "$base" -- 'src/*.cc' 'apps/*.cc'
    git ls-files 'src/*.cc'
    git ls-files 'apps/*.cc'
  } | awk '!seen[$0]++' | grep -v '_neon')
  one "compile commands" cmake --preset fuzz || return 0
  one "clang-tidy" tidy_files "${files[@]}" || true
  say "  clang-tidy: $(grep -c '^clean: ' "$LOGS/tidy.findings" || true) of ${#files[@]} files looked at and clean"
}

tidy_files() {
  local out=$LOGS/tidy.findings seconds=${CHECK_TIDY_SECONDS:-150} rc=0
  [ "${CHECK_TIDY:-}" != all ] || seconds=0
  rm -f "$out"
  printf '%s\n' "$@" | timeout "$seconds" xargs -P "$JOBS" -I{} sh -c \
    'clang-tidy -p build/fuzz --quiet --warnings-as-errors="*" {} 2>/dev/null && echo "clean: {}"' >"$out" || rc=$?
  cat "$out"
  ! grep -q 'error:' "$out" || return 1
  [ $rc -eq 0 ] || [ $rc -eq 124 ]
}
