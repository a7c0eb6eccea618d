#!/usr/bin/env bash
# Tests and times the CUDA part on a machine with a card. The programs and their shared libraries lie in one directory,
# as for bench/device.sh. Every step has a time limit of its own.
#   bench/device_cuda.sh DIRECTORY [RESULTS] [STEP...]
# Steps: test sanitize scan attend decode kinds encoded kept prefill sparse layers disk hybrid hybrid-prefill hybrid1m locality
# layer1m learn (default: all but sanitize); aims-1m aims-decode aims-hybrid aims-memory aims-prompt aims-prompt-1m (the figures that are
# aimed at, each with what llama.cpp gave on such a machine; 7 minutes in all).
set -u
dir=$(cd "$1" && pwd)
out=${2:-$dir}
shift 2 2>/dev/null || shift $#
steps=${*:-test scan attend decode kinds encoded kept prefill sparse layers disk hybrid hybrid-prefill hybrid1m locality layer1m learn}
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
# Of all layers, or of the first so many; calls side by side make it once.
make_model() {
  local file=$model${1:+.$1}
  (
    flock 9
    [ -s "$file" ] || { "$dir/synthetic_model" $shape "$file.part" q4_0 "$@" && mv "$file.part" "$file"; }
  ) 9>"$file.lock"
}
# limit of seconds, then arguments of bench; the largest use of the card that nvidia-smi saw meanwhile stands below.
bench() {
  local limit=$1 file=$2
  shift 2
  nvidia-smi -i "${CUDA_VISIBLE_DEVICES:-0}" --query-gpu=memory.used --format=csv,noheader,nounits -lms 200 >"$out/vram.txt" 2>/dev/null &
  local watch=$!
  SECONDS=0
  timeout "$limit" "$dir/longkv" bench -m "$file" -t 16 $([[ " $* " == *" -ngl "* ]] || echo -ngl all) "$@" || { failed=1; echo "FAILED: bench $*"; }
  kill $watch 2>/dev/null
  echo "   $SECONDS s in all; VRAM peak by nvidia-smi $(sort -n "$out/vram.txt" | tail -1) MiB"
}
# Tests of a program in so many processes at once, and the end of what each says.
in_parts() {
  local parts=$1 i pids=()
  shift
  for ((i = 0; i < parts; ++i)); do
    GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$i "$@" >"$out/part$i.txt" 2>&1 &
    pids+=($!)
  done
  for ((i = 0; i < parts; ++i)); do
    wait "${pids[$i]}" || { failed=1; echo "FAILED: part $i"; grep -E 'Failure|FAILED|=========' "$out/part$i.txt" | head -30; }
    tail -4 "$out/part$i.txt"
  done
}
# Block-sparse recipes whose layers all choose; boxes in bytes.
choose() { echo "index=minmax(block=16,summary=q8${3:-}) + select=topk(budget=$1,sink=16,local=64) + store=$2"; }
aim() { echo "-- aim: $*"; }
flat="index=bits(block=16,coarse=1) + select=topk(budget=4096,sink=16,local=64,aggregate=softmax) + store=q8_0"
for step in $steps; do
  echo "== $step, $(date -u +%T)"
  case $step in
    test) in_parts 4 timeout 200 "$dir/test_cuda" --gtest_brief=1 ;;
    sanitize)
      filter='CardHot.*:CardSelect.*:CardRow.*:CardAttention.Stored*:CardChunk.*:CardAttention.OneToken*:CardOld.*:CardBits.*:CardPromptLines.*:CardPromptShares.Shares*:CardPromptBlocks.Means*:CardPromptSparse.Windows*'
      for tool in memcheck racecheck; do
        in_parts 4 timeout 240 compute-sanitizer --tool $tool --error-exitcode 9 "$dir/test_cuda" --gtest_brief=1 \
          --gtest_filter="$filter:-CardOld.Small*"
      done
      ;;
    scan) timeout 60 "$dir/card_scan" || failed=1 ;;  # choosing blocks at 1M tokens, layer by layer
    attend) timeout 60 "$dir/card_attend" || failed=1 ;;  # a token's attention over 128K rows of every kind
    decode)
      make_model
      bench 60 "$model" -p 0 -n 64 -d 0,128K -r 2 --fill random --kv "full,quest:budget=4096"
      bench 60 "$model" -p 0 -n 64 -d 128K -r 2 --fill random --kv full -ctk q8_0 -ctv q8_0
      ;;
    kinds)  # of rows, and rows chosen by mass
      make_model
      for type in f16 q8_0 fp8 q4_0; do
        bench 60 "$model" -p 0 -n 32 -d 128K -r 1 --fill random -ctk $type -ctv $type
      done
      bench 60 "$model" -p 0 -n 32 -d 128K -r 1 --fill random --kv "quest:budget=8192,twilight:refine=exact"
      ;;
    encoded)  # old rows in 2 and 4 bits, and under a mask that keeps every other channel
      make_model
      mask=/dev/shm/mask.txt
      awk 'BEGIN { for (l = 0; l < 32; ++l) { for (c = 0; c < 1024; ++c) printf "%d ", c % 2; print "" } }' >"$mask"
      bench 60 "$model" -p 0 -n 32 -d 128K -r 1 --fill random --kv "full,kivi4,kivi2"
      bench 60 "$model" -p 0 -n 32 -d 128K -r 1 --fill random --kv "leank:mask=$mask"
      bench 60 "$model" -p 0 -n 32 -d 128K -r 1 --fill random --kv "quest:budget=4096+kivi4"
      ;;
    layers)  # that lie in memory: as asked, and by themselves under a cap
      make_model
      for options in "-ngl all" "-ngl 16" "-ngl 16 --no-repack" "-ngl auto --vram 4G"; do
        bench 90 "$model" $options -p 4096,16384 -n 16 -d 0 -r 1
      done
      bench 60 "$model" -ngl 0 -p 512 -n 16 -d 0 -r 1
      ;;
    kept)  # rows that keep stages leave
      make_model
      bench 80 "$model" -p 0 -n 64 -d 16K -r 1 --fill random --kv "snapkv:budget=4096,adakv:budget=4096,normmass:budget=4096"
      bench 80 "$model" -p 16K -n 64 -d 0 -r 1 --kv "snapkv:budget=4096"
      ;;
    disk)
      make_model
      bench 60 "$model" --kv-place cpu -p 4096 -n 8 -d 0 -r 1
      bench 60 "$model" --kv-place disk -p 4096 -n 8 -d 0 -r 1
      ;;
    prefill)
      make_model
      bench 60 "$model" -p 512,2048,32K -n 0 -r 2
      bench 60 "$model" -p 128K -n 0 -r 1 --no-warmup
      ;;
    sparse)  # prompts of 128K by every pattern; -v prints the share of scores that was computed
      make_model
      for kv in full xattention minference "prefill=block_sparse(blocks=100)" a_shape; do
        bench 60 "$model" -v -p 128K -n 0 -r 1 --no-warmup --kv "$kv"
      done
      ;;
    hybrid)
      make_model
      bench 90 "$model" -p 0 -n 64 -d 128K -r 3 --fill random --kv "$(choose 16384 f16)" --kv-place hybrid --vram 12G
      bench 60 "$model" -p 0 -n 64 -d 16K -r 3 --fill random --kv "$(choose 4096 q8_0)" --kv-place hybrid --vram 24G
      ;;
    hybrid-prefill)  # the same prompt with rows on the card, with rows in memory, and read block-sparsely
      make_model
      bench 60 "$model" -p 128K -n 0 -r 1 --no-warmup --kv "$(choose 16384 q8_0)"
      bench 60 "$model" -p 128K -n 0 -r 1 --no-warmup --kv "$(choose 16384 q8_0)" --kv-place hybrid --vram 12G
      bench 60 "$model" -p 128K -n 0 -r 1 --no-warmup --kv "prefill=block_sparse(blocks=100) + $(choose 16384 q8_0)" \
        --kv-place hybrid --vram 12G
      ;;
    hybrid1m)
      make_model
      bench 160 "$model" -p 0 -n 64 -d 1M -r 3 --fill random --kv "$(choose 16384 q8_0)" --kv-place hybrid --vram 23G
      bench 160 "$model" -p 0 -n 64 -d 1M -r 3 --fill random --kv "$(choose 4096 q8_0)" --kv-place hybrid --vram 23G
      bench 160 "$model" -p 0 -n 64 -d 1M -r 3 --fill random --kv "$(choose 4096 q8_0 ,coarse=16)" --kv-place hybrid --vram 23G
      bench 160 "$model" -p 0 -n 64 -d 1M -r 3 --fill random --kv-place hybrid --vram 23G \
        --kv "index=bits(block=16,coarse=1) + select=topk(budget=4096,sink=16,local=64,aggregate=softmax) + store=q8_0"
      ;;
    locality)  # a trained model on real text, a sixth of its blocks on the card: how many of those attended lie there
      small=models/needle-10m-128k-f16.gguf
      kv="index=minmax(block=16) + select=topk(budget=2048,sink=16,local=64)"
      cat docs/*.md README.md HACKING.md | head -c 125000 >"$out/text.txt"
      answer() { timeout 60 "$dir/longkv" run -m $small -c 128K -ngl all --kv-place hybrid --raw -f "$out/text.txt" -n 300 \
        --ignore-eos --temp 0 -s 1 --kv "$kv" "$@" 2>&1 >/dev/null; }
      least=$(answer --vram 90M | grep -o '[0-9]*M$')
      echo "smallest --vram: $least"
      answer --vram "$least"
      ;;
    layer1m)  # one layer of the shape, and two read sparsely: their difference is a layer without embeddings
      for layers in 1 2; do
        make_model $layers
        bench 60 "$model.$layers" -p 1M -n 0 -r 1 --no-warmup --kv-place hybrid --vram 23G \
          --kv "prefill=block_sparse(blocks=820,dense_layers=0) + $(choose 16384 q8_0)"
      done
      bench 90 "$model.1" -p 1M -n 0 -r 1 --no-warmup --kv "$(choose 16384 q8_0)" --kv-place hybrid --vram 23G
      ;;
    aims-1m)
      make_model
      aim "one-bit index at 1M 2 ms a step"
      timeout 60 "$dir/card_scan" || failed=1
      aim "1M hybrid in 23G (24 GiB card), budget 16K and 4K: 60 and 100 tokens/s (KTransformers 16.9); over 16K 1.3 times the time or less"
      bench 160 "$model" -p 0 -n 64 -d 16K,1M -r 2 --fill random --kv "$(choose 4096 q8_0 ,coarse=16)" --kv-place hybrid --vram 23G
      bench 160 "$model" -p 0 -n 64 -d 1M -r 2 --fill random --kv "$(choose 16384 q8_0)" --kv-place hybrid --vram 23G
      aim "one-bit keys, rows on the card"
      bench 90 "$model" -p 0 -n 64 -d 16K,1M -r 2 --fill random --kv "$flat"
      ;;
    aims-decode)
      make_model
      aim "empty 460 tokens/s (llama.cpp 307); dense 128K 147 (91.9), 512K 46.7 (29.2)"
      bench 90 "$model" -p 0 -n 64 -d 0,128K,512K -r 2 --fill random
      aim "q8_0 and fp8 faster than f16 (llama.cpp 49.8 in q8_0); quest with 4K within 15% of the empty cache"
      for type in q8_0 fp8; do bench 60 "$model" -p 0 -n 64 -d 128K -r 2 --fill random -ctk $type -ctv $type; done
      bench 60 "$model" -p 0 -n 64 -d 128K -r 2 --fill random --kv "quest:budget=4096,onebit:budget=4096"
      ;;
    aims-hybrid)
      make_model
      aim "128K in 12G, f16, budget 16K: 100 tokens/s (KTransformers 27.5)"
      bench 90 "$model" -p 0 -n 64 -d 128K -r 2 --fill random --kv "$(choose 16384 f16)" --kv-place hybrid --vram 12G
      ;;
    aims-memory)  # ktransformers' index is the CPU's
      make_model
      aim "128K in memory: dense 1.84 tokens/s (llama.cpp 0.46), budget 16K 18.4"
      bench 90 "$model" -p 0 -n 12 -d 128K -r 1 --fill random --kv-place cpu --kv "full,$(choose 16384 f16),ktransformers:budget=8320"
      ;;
    aims-prompt)
      make_model
      aim "128K dense 16 s (llama.cpp 27.0); copies that are not hidden 5% or less of the same prompt without any"
      bench 60 "$model" -p 128K -n 0 -r 1 --no-warmup --kv "$(choose 16384 q8_0)"
      bench 60 "$model" -p 128K -n 0 -r 1 --no-warmup --kv "$(choose 16384 q8_0)" --kv-place hybrid --vram 12G
      bench 60 "$model" -p 128K -n 0 -r 1 --no-warmup
      ;;
    aims-prompt-1m)  # layers alike, so that the difference of one and two is what 32 take
      for layers in 1 2; do
        make_model $layers
        aim "1M block-sparse, a tenth of the scores: 120 s for 32 layers, 3.75 s each"
        bench 60 "$model.$layers" -p 1M -n 0 -r 1 --no-warmup --kv-place hybrid --vram 23G \
          --kv "prefill=block_sparse(blocks=820,dense_layers=0) + $(choose 16384 q8_0)"
      done
      aim "1M dense: 650 s for 32 layers, 20.3 s each"
      bench 90 "$model.1" -p 1M -n 0 -r 1 --no-warmup --kv-place hybrid --vram 23G --kv "$(choose 16384 q8_0)"
      ;;
    learn)  # masks and gates, on the card and on all cores
      small=models/needle-10m-128k-f16.gguf
      make_model 4
      cat docs/*.md >"$out/text.txt"
      learn() { rm -f "$out/learned"*; SECONDS=0; timeout 90 "$dir/longkv" train "$@" -o "$out/learned.gguf" -t 16 2>&1 | tail -7 || failed=1; echo "   $SECONDS s"; }
      for card in all 0; do
        learn leank -m $small --longest 8K --ratio 0.72 --refine-steps 0 -ngl $card
        learn duo -m $small --longest 8K --steps 60 -ngl $card
        learn leank -m "$model.4" --only-data --data "$out/text.txt" --shortest 4K --longest 4K --ratio 0.72 --refine-steps 8 --held-out 1 --chunk 64 -ngl $card
      done
      ;;
    *) echo "no such step: $step" && failed=1 ;;
  esac
done
echo "failed: $failed"
exit $failed
