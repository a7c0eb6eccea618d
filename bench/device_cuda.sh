#!/usr/bin/env bash
# Tests and times the CUDA part on a machine with a card. The programs and their shared libraries lie in one directory,
# as for bench/device.sh.
#   bench/device_cuda.sh DIRECTORY [RESULTS] [STEP...]    steps: test decode prefill sanitize (default: test decode prefill)
set -u
dir=$(cd "$1" && pwd)
out=${2:-$dir}
shift 2 2>/dev/null || shift $#
steps=${*:-test decode prefill}
export LD_LIBRARY_PATH="$dir/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
cublas=$(find / -name libcublasLt.so.13 -not -path '/proc/*' 2>/dev/null | head -1)
LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$(dirname "$cublas")"
exec > >(tee "$out/device_cuda.txt") 2>&1

date -u
"$dir/longkv" version
nvidia-smi --query-gpu=name,driver_version,memory.free --format=csv,noheader
failed=0
shape=llama-3.1-8b
model=/dev/shm/synthetic-$shape.gguf
bench() { timeout 280 "$dir/longkv" bench -q -m "$model" -t 16 -ngl all "$@" || failed=1; }
make_model() { [ -s "$model" ] || "$dir/synthetic_model" $shape "$model" q4_0; }
for step in $steps; do
  echo "== $step, $(date -u +%T)"
  case $step in
    test) timeout 250 "$dir/test_cuda" --gtest_brief=1 || failed=1 ;;
    sanitize)
      for tool in memcheck racecheck; do
        timeout 200 compute-sanitizer --tool $tool "$dir/test_cuda" --gtest_brief=1 \
          --gtest_filter='CardAttention.Prompts*:CardRow.*:CardMatrix.Decodes*' 2>&1 | tail -3 || failed=1
      done
      ;;
    decode)
      make_model
      bench -p 0 -n 64 -d 0,32K,128K,512K -r 3 --fill random
      bench -p 0 -n 64 -d 32K,128K -r 3 --fill random -ctk q8_0 -ctv q8_0
      ;;
    prefill)
      make_model
      bench -p 512,2048,32K -n 0 -r 2
      bench -p 128K -n 0 -r 1 --no-warmup
      ;;
  esac
done
echo "failed: $failed"
exit $failed
