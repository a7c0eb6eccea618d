#!/usr/bin/env bash
# The tables of accuracy on a machine with cards: every card reads prompts, the CPU decodes under every recipe. Three
# lengths run side by side on each card, each a list of steps; a step that was stopped goes on when the script is called again.
# The program and its shared libraries lie in one directory, as for bench/device.sh.
#   bench/device_eval.sh DIRECTORY RESULTS start            starts the lists in the background and returns
#   bench/device_eval.sh DIRECTORY RESULTS wait SECONDS     waits for their end, at most so long, then packs what is there
#   bench/device_eval.sh DIRECTORY RESULTS stop             interrupts them, writes the tables, packs
# RESULTS gets one archive a length. Environment: CARDS (2), THREADS of the lists, a number a length, for both cards or for
# one after the other ("9 7 4"), RAM of the lists in GiB ("16 50 62"), LENGTHS ("8K 32K 128K"), SAMPLES (percent of those
# below, 100), NGL (all), WORK (/tmp/longkv-eval), CUBLAS (libcublasLt.so.13, which is looked for). Folders of earlier results in WORK are gone on from.
set -u
dir=$(cd "$1" && pwd)
out=$(mkdir -p "$2" && cd "$2" && pwd)
cublas=${CUBLAS:-$(find / -name libcublasLt.so.13 -not -path '/proc/*' 2>/dev/null | head -1)}
export LD_LIBRARY_PATH="$dir/lib:${LD_LIBRARY_PATH:-}:$(dirname "${cublas:-/}")"
cards=${CARDS:-2}
work=${WORK:-/tmp/longkv-eval}
read -r -a threads <<<"${THREADS:-9 7 4}"
read -r -a memory <<<"${RAM:-16 50 62}"
read -r -a lengths <<<"${LENGTHS:-8K 32K 128K}"
model=models/needle-10m-128k-f16.gguf
mask=models/needle-10m-128k-leank70.gguf
few=models/needle-10m-128k-leank28.gguf
gates=models/needle-10m-128k-duo.gguf
assigned=models/needle-10m-128k-minference.json
sample="tail=sample(rate=0.025,epsilon=0)"

budgets() {  # NAME BUDGET...: the recipe at each budget
  local name=$1 text=
  shift
  for b in "$@"; do text+=",$name:budget=$b"; done
  echo "${text#,}"
}
all() {  # BUDGETS NAME...: several recipes at the same budgets
  local b=$1 text=
  shift
  for name in "$@"; do text+=",$(budgets "$name" $b)"; done
  echo "${text#,}"
}
# KTransformers' five kinds of representative at blocks of 128 and of 16, and one bit a channel in their place.
kinds="ktransformers:budget=2048"
for kind in max mean minmax fixed; do kinds+=",ktransformers:budget=2048,index=$kind"; done
for kind in max mean minmax fixed dynamic; do kinds+=",ktransformers:budget=2048,block=16,index=$kind"; done
kinds+=",ktransformers:budget=2048,index=bits,ktransformers:budget=2048,block=16,index=bits"
kinds+=",ktransformers:budget=2048,block=16,index=bits,heads=kv"
kinds+=",ktransformers:budget=2048,block=16,index=bits,heads=kv,aggregate=softmax"
four="512 1024 2048 4096"
evictors="streaming pyramidkv adakv expected_attention keydiff knorm tova"
reads="threshold=2K,dense_layers=0"
encodings="q8,q4,q4:rotate=true,fp8,kivi2,kivi4,think,think:ratio=0.7,leank:mask=$mask"
masks="kivi4,leank:mask=$mask,leank:mask=$mask+kivi4,leank:mask=$few,sink=64,window=384+kivi4"
bits=""
for b in $four; do bits+=",ktransformers:budget=$b,block=16,index=bits"; done
bits=${bits#,}
merging="kvzip:keep_ratio=0.25,fastgen,normmass:budget=2048,kvslimmer:budget=2048,asymkv:budget=2048"
patterns="a_shape:window=1920,$reads,minference:file=$assigned,$reads,flex:$reads,xattention:$reads,prefill=block_sparse(blocks=32,$reads)"

# NAME LENGTH SAMPLES RECIPES
step() {
  local name=$1 length=$2 samples=$(($3 * ${SAMPLES:-100} / 100)) kv=$4 noise=${noise:-0}
  [ "$samples" -gt 0 ] || samples=1
  echo "$(date -u +%T) $name, $samples samples: $kv"
  "$dir/longkv" eval -q -m $model -ngl "${NGL:-all}" -t "$count" --jobs "$count" --ram "$ram" --tasks "$tasks" --lengths "$length" \
    --samples "$samples" --noise "$noise" --kv-check 32 -o "$work/$name" --kv "$kv" >"$work/$name.txt" 2>>"$work/$name.log"
  local code=$?
  echo "$(date -u +%T) $name: exit code $code"
  [ $code -ne 0 ] && [ -e "$work/stop" ] && exit 0
}
# Steps in the order of what they are worth, for the time may end before the list. Recipes of one step share the reading.
list8() {
  noise=2 step "$1" "$2" 100 "$(all "$four" oracle onebit quest ktransformers snapkv),onebit:budget=1024 + $sample,vattention:budget=1024"
  step "$1" "$2" 100 "$(all "$four" $evictors),$(budgets infllm 1024 2048 4096),$(budgets ktransformers-preselect 1024 2048 4096),duo:gates=$gates"
  step "$1" "$2" 100 "$encodings,quest:budget=1024+q8"
  step "$1" "$2" 100 "$(all "$four" double_sparsity sparq retroinfer),twilight,oracle:budget=1024 + $sample,oracle:budget=1024,heads=query"
  step "$1" "$2" 100 "$bits,$(budgets vattention 512 2048 4096),$(budgets twilight $four)"
  step "$1" "$2" 10 "$merging,$patterns,magicpig"
  step "$1" "$2" 50 "$(budgets h2o $four)"
  step "$1" "$2" 25 "$merging,$patterns,magicpig"
}
list32() {
  step "$1" "$2" 100 "$kinds,$(all "$four" oracle onebit quest ktransformers snapkv)"
  step "$1" "$2" 100 "$masks"
  step "$1" "$2" 50 "$(all 2048 $evictors infllm ktransformers-preselect double_sparsity retroinfer),duo:gates=$gates"
  step "$1" "$2" 25 "$encodings,oracle:budget=1024 + $sample,$(all 2048 sparq twilight vattention)"
  step "$1" "$2" 100 "$(all 2048 $evictors infllm ktransformers-preselect double_sparsity retroinfer),duo:gates=$gates"
  step "$1" "$2" 100 "$encodings"
  step "$1" "$2" 50 "$(all "1024 4096" $evictors infllm ktransformers-preselect),ktransformers,ktransformers-preselect"
  step "$1" "$2" 100 "$(all "$four" $evictors),$(all "1024 4096" infllm ktransformers-preselect)"
}
list128() {
  step "$1" "$2" 25 "$kinds,$(all "$four" oracle onebit),oracle:budget=1024 + $sample,quest:budget=2048,$(all 4096 quest ktransformers snapkv streaming)"
  step "$1" "$2" 25 "$(budgets quest 512 1024),$(budgets ktransformers 512 1024),$(all "512 1024 2048" snapkv streaming),retroinfer:budget=2048,duo:gates=$gates"
  step "$1" "$2" 25 "$masks,q8,q4:rotate=true,kivi2"
  step "$1" "$2" 25 "$(all "2048 4096" $evictors infllm ktransformers-preselect),ktransformers"
}

pack() {
  for length in "${lengths[@]}"; do
    (cd "$work" && tar czf "$out/eval-$length.tgz" $(ls -d ./*-"$length" ./*-"$length".log ./*-"$length".list 2>/dev/null))
  done
  wc -l "$work"/*/samples.jsonl
  tail -n 3 "$work"/*.list
}

running() {  # whether a list is not at its end
  local file
  for file in "$work"/*.pid; do kill -0 "$(cat "$file")" 2>/dev/null && return 0; done
  return 1
}

mkdir -p "$work"
case $3 in
  start)
    rm -f "$work/stop"
    "$dir/longkv" version
    for ((card = 0; card < cards; card++)); do
      # Key-value pairs have longer questions than needles and chains together: as many tokens on either card.
      if [ "$cards" -eq 1 ]; then tasks=niah_multikey_1,kv_retrieval,vt; elif [ $card -eq 0 ]; then tasks=kv_retrieval; else tasks=niah_multikey_1,vt; fi
      for i in "${!lengths[@]}"; do
        length=${lengths[$i]}
        count=${threads[$((card * ${#lengths[@]} + i))]:-${threads[$i]}} ram=${memory[$i]}G
        export tasks count ram
        (
          export CUDA_VISIBLE_DEVICES=$card
          list=(list8 list32 list128)
          # Signals stop the program, after which the list sees that it shall end. SIGINT is ignored in the background.
          setsid bash -c "trap : TERM; $(declare -f step all budgets "${list[$i]}"); dir='$dir' work='$work' model=$model mask=$mask gates=$gates
            assigned=$assigned sample='$sample' kinds='$kinds' four='$four' evictors='$evictors' encodings='$encodings'
            masks='$masks' bits='$bits' merging='$merging' patterns='$patterns'
            ${list[$i]} card$card-$length $length" >"$work/card$card-$length.list" 2>&1 </dev/null &
          echo $! >"$work/card$card-$length.pid"
        )
      done
    done
    ;;
  wait)
    end=$((SECONDS + $4))
    while [ $SECONDS -lt $end ] && running; do sleep 1; done
    uptime
    pack
    ;;
  stop)
    touch "$work/stop"
    for file in "$work"/*.pid; do kill -TERM -- "-$(cat "$file")" 2>/dev/null; done
    for ((i = 0; i < 30; i++)); do running || break; sleep 1; done
    uptime
    pack
    ;;
  *) echo "start, wait or stop?" && exit 2 ;;
esac
