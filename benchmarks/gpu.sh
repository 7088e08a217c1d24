#!/usr/bin/env bash
# Everything that should be measured on one GPU, in at most nine minutes: is it right, then how fast, then how large.
#   bash benchmarks/gpu.sh OUT                        JSON files and log.txt in the folder OUT
#   bash benchmarks/gpu.sh OUT --device cpu --tiny    the same programs over small shapes, without a GPU
# Needs torch, transformers and a checkout; installs and downloads nothing. PYTHON names the interpreter.
# A part that fails or runs out of time stops no other; the exit status is the number of those that did.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -ge 1 ] || { echo "usage: $0 OUT [--device cpu] [--tiny]" >&2; exit 64; }
out=$1; shift
mkdir -p "$out"; out=$(cd "$out" && pwd)
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
failed=0
: > "$out/log.txt"

part() {  # name, seconds
  echo "== $1 (at most $2 s)" | tee -a "$out/log.txt"
  rm -f "$out/$1.json"
  timeout -k 5 "$2" "${PYTHON:-python3}" "$root/benchmarks/gpu/$1.py" "$out" "${@:3}" 2>&1 | tee -a "$out/log.txt"
  local status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] && return
  failed=$((failed + 1))
  echo "== $1 failed with status $status" | tee -a "$out/log.txt"
  [ -e "$out/$1.json" ] || printf '{"part": "%s", "ok": false, "error": "ended with status %s"}\n' "$1" "$status" > "$out/$1.json"
}

part kernel 90 "$@"
part correctness 150 "$@"
part rollout 150 "$@"
part train 80 "$@"
part memory 50 "$@"
exit $failed
