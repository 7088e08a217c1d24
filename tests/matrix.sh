#!/usr/bin/env bash
# Installs areno and runs the quick tests for each Python and PyTorch; to be run before a release.
#
#   bash tests/matrix.sh                                   # 3.11, 3.12, 3.13 with PyTorch 2.11 and 2.13
#   PYTHONS="3.12" TORCHES="2.13.0" bash tests/matrix.sh   # some of them
#   TESTS="tests/engine" bash tests/matrix.sh              # some tests
#
# Adds a line for each to tests/matrix.tsv: date, commit, Python, PyTorch, transformers, what pytest says. A Python that is not
# installed is named and skipped. TORCH_INDEX_URL is as in the Makefile. Each environment takes up to 7 GB while it is tested.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
failed=0
for python in ${PYTHONS:-3.11 3.12 3.13}; do
  interpreter=$(command -v "python$python" || true)
  if ! "$interpreter" -c "" 2>/dev/null; then
    echo "python$python is not installed: skipped"
    continue
  fi
  for torch in ${TORCHES:-2.11.0 2.13.0}; do
    folder=$(mktemp -d)
    echo "== Python $python, PyTorch $torch"
    "$interpreter" -m venv "$folder/venv"
    pip=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    # Versions of all packages but PyTorch and what it brings are those of development.
    grep -v -i -E "^(torch|triton|nvidia|cuda)" constraints.txt >"$folder/constraints.txt"
    if "${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$torch" &&
      "${pip[@]}" --constraint "$folder/constraints.txt" "torch==$torch" --editable ".[dev,gguf,math]"; then
      result=$(OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadgroup -m "not long" \
        ${TESTS:-} 2>&1 | tee "$folder/log.txt" | tail -1) || true
      grep -E "^(FAILED|ERROR)" "$folder/log.txt" || true
    else
      result="could not be installed"
    fi
    transformers=$("$folder/venv/bin/python" -c "import transformers; print(transformers.__version__)" 2>/dev/null || echo none)
    commit=$(git describe --always --exclude='*')
    [[ -z $(git status --porcelain -uno -- . ':!tests/matrix.tsv') ]] || commit+=-dirty
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$(date +%F)" "$commit" "$python" "$torch" "$transformers" "$result" | tee -a "$root/tests/matrix.tsv"
    [[ $result == *passed* && $result != *failed* && $result != *error* ]] || failed=1
    rm -rf "$folder"
  done
done
exit $failed
