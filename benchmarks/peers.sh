#!/usr/bin/env bash
# Sets up the peers that areno is measured against, each in a virtual environment of its own under .peers/.
# Usage: bash benchmarks/peers.sh [trl]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
index=${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}

trl() {
  local env=.peers/trl
  [ -x "$env/bin/python" ] || "$python" -m venv "$env"
  # shellcheck disable=SC2086
  "$env/bin/python" -m pip install -q $index "torch==2.13.0"
  "$env/bin/python" -m pip install -q "trl==1.16.0" "transformers==5.23.0" "datasets==5.2.0" "accelerate==1.15.0" "tensorboard==2.21.0"
  "$env/bin/python" -c "import trl, torch; print('trl', trl.__version__, 'torch', torch.__version__)"
}

for peer in "${@:-trl}"; do "$peer"; done
