#!/usr/bin/env bash
# Tests and times a build on another machine: every test program at every instruction-set level that the machine has,
# then decode and prompt speed by level, recipe and thread count. The program, its tests and their shared libraries are
# built elsewhere and lie in one directory.
#   bench/device.sh DIRECTORY [RESULTS]      writes RESULTS/device.txt (default: the directory)
set -u
dir=$(cd "$1" && pwd)
out=${2:-$dir}
export LD_LIBRARY_PATH="$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
model=models/needle-10m-128k-f16.gguf
exec > >(tee "$out/device.txt") 2>&1

date -u
"$dir/longkv" version --bandwidth
nproc
failed=0
for test in "$dir"/test_*; do
  log="$out/$(basename "$test").log"
  if "$test" >"$log" 2>&1; then
    grep -E '^\[  PASSED  \]' "$log" | sed "s|^|$(basename "$test"): |"
  else
    failed=1
    echo "$(basename "$test"): FAILED"
    grep -E '^\[  FAILED  \]|Failure|error' "$log" | head -20
  fi
done

levels=$("$dir/longkv" version --json | python3 -c 'import json,sys; print(" ".join(json.load(sys.stdin)["isa_available"]))')
for level in $levels; do
  [ "$level" = base ] && continue
  echo "== level $level, needle-10m-128k, tokens/s"
  "$dir/longkv" bench --isa "$level" -m $model -t 8 -p 2048 -n 32 -d 0,32768 -r 3 --fill random --kv full 2>/dev/null
  "$dir/longkv" bench --isa "$level" -m $model -t 8 -p 0 -n 32 -d 32768,131072 -r 3 --fill random \
    --kv "quest:budget=2048,ktransformers:budget=2048" 2>/dev/null
done
echo "== products beside oneDNN"
[ -x "$dir/matmul_bench" ] && timeout 100 "$dir/matmul_bench" 1 0.3 q4 2
echo "tests failed: $failed"
exit $failed
