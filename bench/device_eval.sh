#!/usr/bin/env bash
# The tables of accuracy on a machine with cards: every card reads prompts, the CPU decodes under every recipe. Three
# lengths run side by side on each card, each a list of steps; a step that was stopped goes on when the script is called again.
# The program and its shared libraries lie in one directory, as for bench/device.sh.
#   bench/device_eval.sh DIRECTORY RESULTS start            starts the lists in the background and returns
#   bench/device_eval.sh DIRECTORY RESULTS wait SECONDS     waits for their end, at most so long, then packs what is there
#   bench/device_eval.sh DIRECTORY RESULTS stop             interrupts them, packs
# RESULTS gets one archive a length. Environment: CARDS (2), THREADS of the lists, a number a length, for both cards or for
# one after the other ("9 7 4"), RAM of the lists in GiB ("16 50 62"), LIMIT (seconds after which lists end by themselves; none),
# LENGTHS ("8K 32K 128K"), SAMPLES (percent of those below, 100), NGL (all), WORK (/tmp/longkv-eval), CUBLAS
# (libcublasLt.so.13, which is looked for). Folders of earlier results in WORK are gone on from; of a list that was stopped,
# `longkv eval --report -o FOLDER` writes the tables.
set -u
dir=$(cd "$1" && pwd)
out=$(mkdir -p "$2" && cd "$2" && pwd)
verb=${3:-}
work=${WORK:-/tmp/longkv-eval}
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
others="512 1024 4096"
evictors="streaming pyramidkv adakv expected_attention keydiff knorm tova"
selectors="double_sparsity sparq retroinfer twilight vattention"
reads="threshold=2K,dense_layers=0"
encodings="q8,q4,q4:rotate=true,fp8,kivi2,think,think:ratio=0.7"
masks="kivi4,leank:mask=$mask,leank:mask=$mask+kivi4,leank:mask=$few,sink=64,window=384+kivi4"
bits=""
for b in $four; do bits+=",ktransformers:budget=$b,block=16,index=bits"; done
bits=${bits#,}
boxes=$(budgets quest $four)
for b in $four; do boxes+=",quest:budget=$b,summary=f16"; done
pair="kvslimmer:budget=2048,asymkv:budget=2048"
patterns="a_shape:window=1920,$reads,minference:file=$assigned,$reads,flex:$reads,xattention:$reads,prefill=block_sparse(blocks=32,$reads)"

past() { [ -e "$work/stop" ] || [ "$(date +%s)" -ge "$until" ]; }

# NAME LENGTH SAMPLES RECIPES
step() {
  local name=$1 length=$2 samples=$(($3 * ${SAMPLES:-100} / 100)) kv=$4 noise=${noise:-0} child code
  [ "$samples" -gt 0 ] || samples=1
  past && exit 0
  echo "$(date -u +%T) $name, $samples samples: $kv"
  "$dir/longkv" eval -q -m $model -ngl "${NGL:-all}" -t "$count" --jobs "$count" --ram "$ram" --tasks "$tasks" --lengths "$length" \
    --samples "$samples" --noise "$noise" --kv-check 32 -o "$work/$name" --kv "$kv" >"$work/$name.txt" 2>>"$work/$name.log" &
  child=$!
  until past || ! kill -0 $child 2>/dev/null; do sleep 1; done
  kill -TERM $child 2>/dev/null
  for ((i = 0; i < 20; i++)); do
    kill -0 $child 2>/dev/null || break
    sleep 1
  done
  kill -KILL $child 2>/dev/null  # every line is there already, a torn one is left out
  wait $child
  code=$?
  echo "$(date -u +%T) $name: exit code $code, $(wc -l <"$work/$name/samples.jsonl") answers"
}
# Recipes of one step share the reading. First boxes in bytes beside boxes in halves, then the steps whose cells docs/results.md lacked before the 27 minutes of 2026-11-30 (at each
# length the first were done then), at the end what it had in full, for the time may end before the list.
list8() {
  step "$1" "$2" 100 "$boxes"
  step "$1" "$2" 25 "$pair,normmass:budget=2048,fastgen,kvzip:keep_ratio=0.25,magicpig,$(budgets h2o $four),$patterns"
  step "$1" "$2" 100 "$pair,magicpig,$(budgets twilight $four),$(budgets vattention $others),$bits"
  step "$1" "$2" 100 "normmass:budget=2048,fastgen"
  step "$1" "$2" 100 "kvzip:keep_ratio=0.25,$(budgets h2o $four),$patterns"
  step "$1" "$2" 25 "kvslimmer-release:budget=2048,asymkv-release:budget=2048"
  step "$1" "$2" 100 "$(all "$four" double_sparsity sparq retroinfer),twilight,oracle:budget=1024 + $sample,oracle:budget=1024,heads=query"
  noise=2 step "$1" "$2" 100 "$(all "$four" oracle onebit quest ktransformers snapkv),onebit:budget=1024 + $sample,vattention:budget=1024"
  step "$1" "$2" 100 "$(all "$four" $evictors),$(all "1024 2048 4096" infllm ktransformers-preselect),duo:gates=$gates"
  step "$1" "$2" 100 "$encodings,$masks,quest:budget=1024+q8"
}
list32() {
  step "$1" "$2" 100 "$boxes"
  step "$1" "$2" 100 "$(all "$four" $evictors),$(all "1024 2048 4096" infllm ktransformers-preselect),ktransformers,ktransformers-preselect,duo:gates=$gates"
  step "$1" "$2" 25 "$(all "$four" $selectors)"
  step "$1" "$2" 100 "$encodings,$(budgets sparq 2048),oracle:budget=1024 + $sample"
  step "$1" "$2" 100 "$(all "$four" $selectors)"
  step "$1" "$2" 25 magicpig
  step "$1" "$2" 100 "$kinds,$(all "$four" oracle onebit quest ktransformers snapkv)"
  step "$1" "$2" 100 "$masks"
}
list128() {
  step "$1" "$2" 25 "$boxes"
  step "$1" "$2" 25 "$(all "$four" $evictors),$(budgets snapkv $four),$(all "512 1024" quest ktransformers),$(all "1024 2048 4096" infllm ktransformers-preselect)"
  step "$1" "$2" 25 "$encodings,$(budgets retroinfer 2048),$(budgets double_sparsity 2048),duo:gates=$gates,ktransformers,ktransformers-preselect"
  step "$1" "$2" 25 "$(budgets sparq 2048),$(budgets twilight 2048),$(budgets vattention 2048)"
  step "$1" "$2" 25 "$(all "$four" $selectors)"
  step "$1" "$2" 25 "$kinds,$(all "$four" oracle onebit),oracle:budget=1024 + $sample,$(all "2048 4096" quest ktransformers)"
  step "$1" "$2" 25 "$masks"
}

pack() {
  for length in "${lengths[@]}"; do
    (cd "$work" && tar czf "$out/eval-$length.tgz" machine.txt $(ls -d ./*-"$length" ./*-"$length".log ./*-"$length".list 2>/dev/null))
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
case $verb in
  start)
    rm -f "$work/stop"
    cublas=${CUBLAS:-$(find / -name libcublasLt.so.13 -not -path '/proc/*' 2>/dev/null | head -1)}
    LD_LIBRARY_PATH="$dir/lib:${LD_LIBRARY_PATH:-}:$(dirname "${cublas:-/}")"
    export LD_LIBRARY_PATH
    cards=${CARDS:-2}
    read -r -a threads <<<"${THREADS:-9 7 4}"
    read -r -a memory <<<"${RAM:-16 50 62}"
    "$dir/longkv" version | tee "$work/machine.txt"
    lscpu >>"$work/machine.txt" 2>&1
    nvidia-smi >>"$work/machine.txt" 2>&1
    list=(list8 list32 list128)
    export until=$(($(date +%s) + ${LIMIT:-1000000}))
    for ((card = 0; card < cards; card++)); do
      # Key-value pairs have longer questions than needles and chains together: as many tokens on either card.
      if [ "$cards" -eq 1 ]; then tasks=niah_multikey_1,kv_retrieval,vt; elif [ $card -eq 0 ]; then tasks=kv_retrieval; else tasks=niah_multikey_1,vt; fi
      for i in "${!lengths[@]}"; do
        length=${lengths[$i]}
        export tasks count=${threads[$((card * ${#lengths[@]} + i))]:-${threads[$i]}} ram=${memory[$i]}G
        CUDA_VISIBLE_DEVICES=$card setsid bash "$0" "$dir" "$out" list "${list[$i]}" "card$card-$length" "$length" \
          >"$work/card$card-$length.list" 2>&1 </dev/null &
        echo $! >"$work/card$card-$length.pid"
      done
    done
    ;;
  list) "$4" "$5" "$6" ;;  # by `start`
  wait)
    end=$((SECONDS + $4))
    while [ $SECONDS -lt $end ] && running; do sleep 1; done
    uptime
    pack
    ;;
  stop)
    touch "$work/stop"
    for ((i = 0; i < 30; i++)); do running || break; sleep 1; done
    uptime
    pack
    ;;
  *) echo "start, wait or stop?" && exit 2 ;;
esac
