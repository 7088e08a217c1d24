#!/usr/bin/env bash
# Everything that should be proven and measured on one GPU, in stages of under eight minutes each.
#   bash benchmarks/gpu.sh OUT                        all stages; JSON files and log.txt in the folder OUT
#   bash benchmarks/gpu.sh OUT kernel rollout         these stages, where a command may not run for long
#   bash benchmarks/gpu.sh OUT --device cpu --tiny    the same programs over small shapes, without a GPU
#   bash benchmarks/gpu.sh OUT --engine vllm          the stage that proves a server of vLLM, or of sglang, as rollout replica
#   bash benchmarks/gpu.sh OUT layouts                layouts of a trainer on all GPUs that there are
#   bash benchmarks/gpu.sh --list                     the stages, and the seconds that each may take
# Needs torch, transformers and a checkout; installs and downloads nothing, models are made on the spot. PYTHON names the
# interpreter. A stage that fails or runs out of time stops no other and leaves what it has measured; the exit status is the
# number of those that did.
set -u
stages="capture:300 kernel:470 correctness:470 rollout:470 train:400 memory:300 top_p:300 paged_tests:470 cycle:470"
optional="server:470 layouts:470"
usage="usage: $0 OUT [--device cpu] [--tiny] [--engine vllm|sglang] [STAGE...], or $0 --list"
root=$(cd "$(dirname "$0")/.." && pwd)
[ "${1:-}" = --list ] && { tr ' :' '\n ' <<< "$stages $optional"; exit 0; }
case "${1:-}" in ""|-*) echo "$usage" >&2; exit 64;; esac
out=$1; shift
options=() chosen=""
while [ $# -gt 0 ]; do
  case "$1" in
    --device) options+=("$1" "${2:-}"); shift;;
    --tiny) options+=("$1");;
    --engine) options+=("$1" "${2:-}"); chosen="$chosen server"; shift;;
    *) case " $stages $optional" in *" $1:"*) chosen="$chosen $1";; *) echo "no stage $1; $usage" >&2; exit 64;; esac;;
  esac
  shift
done
mkdir -p "$out"; out=$(cd "$out" && pwd)
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
failed=0

run() {  # name, seconds
  echo "== $1 (at most $2 s)" | tee -a "$out/log.txt"
  rm -f "$out/$1.json"
  timeout -k 5 "$2" "${PYTHON:-python3}" "$root/benchmarks/gpu/$1.py" "$out" ${options[@]+"${options[@]}"} 2>&1 | tee -a "$out/log.txt"
  local status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] && return
  failed=$((failed + 1))
  echo "== $1 failed with status $status" | tee -a "$out/log.txt"
  [ -e "$out/$1.json" ] || printf '{"stage": "%s", "ok": false, "error": "ended with status %s"}\n' "$1" "$status" > "$out/$1.json"
}

[ -n "$chosen" ] && stages="$stages $optional"
for entry in $stages; do
  name=${entry%%:*}
  case " ${chosen:-$name} " in *" $name "*) run "$name" "${entry##*:}";; esac
done
exit $failed
