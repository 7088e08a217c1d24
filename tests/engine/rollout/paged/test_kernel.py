"""The Triton kernel: correct in Triton's interpreter, and compiled for real GPUs; neither needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

REPO = Path(__file__).parents[4]
pytest.importorskip("triton")

COMPILE = """
import itertools
import sys
import areno
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from areno.engine.rollout.paged import kernel

def translate(function, constants, arch, pointers, **options):
    names = function.arg_names
    kinds = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in kinds.items() if kind[0] == "*" or kind == "i32"}
    source = ASTSource(fn=function, signature=kinds, constexprs=values, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

half = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "sink_ptr", "out_ptr"), "*bf16")
pointers = half | {"table_ptr": "*i32", "length_ptr": "*i32", "part_ptr": "*fp32", "stat_ptr": "*fp32"}
pointers |= {"scale": "fp32", "softcap": "fp32"}
shape = dict(HEADS=16, V_SIZE=128, SINKS=True, BLOCK_V=128)
for arch, parts in ((80, 1), (90, 8)):
    whole = shape | dict(GROUP=2, K_SIZE=128, PAGE=16, PARTS=parts, WINDOWED=True, CAPPED=True)
    whole |= dict(BLOCK_G=16, BLOCK_N=64, BLOCK_K=128)
    made = translate(kernel._attend, whole, arch, pointers)
    assert "mma.sync" in made.asm["ptx"], "no tensor cores"
    assert "ld.global.v4" in made.asm["ptx"] or "cp.async" in made.asm["ptx"], "loads of single numbers"
    assert "ld.local" not in made.asm["ptx"], "registers spill"
    assert made.metadata.shared < 100_000
    assert made.asm["cubin"]
    assert translate(kernel._merge_parts, shape | dict(PARTS=8), arch, pointers).asm["cubin"]
# Every launch that the benchmark tries fits the shared memory of an H100, and more stages do load ahead.
plain = dict(HEADS=16, V_SIZE=128, SINKS=False, BLOCK_V=128, GROUP=2, K_SIZE=128, PAGE=16, PARTS=8)
plain |= dict(WINDOWED=False, CAPPED=False, BLOCK_G=16, BLOCK_K=128)
for launch in itertools.product((64, 128), (kernel.STAGES, 5)):
    made = translate(kernel._attend, plain | dict(BLOCK_N=launch[0]), 90, pointers, num_stages=launch[1])
    assert made.metadata.shared < 227 * 1024, launch
    assert made.asm["ptx"].count("cp.async.commit") > launch[1], launch
    assert "ld.local" not in made.asm["ptx"], launch
# The context is split only where a GPU of 132 processors would idle, and not into crumbs.
sizes = ((2048, 4096), (8, 4096), (8, 300), (64, 9000))
assert [kernel.choose_parts(*size, 132) for size in sizes] == [1, 16, 2, 8]
print("translated")
"""


def run(command, tmp_path, **environment):
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(REPO),
        **environment,
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=REPO)


@pytest.mark.long
@pytest.mark.skipif(
    Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4"),
    reason="the interpreter of Triton 3.6 does not work with NumPy 2.4",
)
def test_the_kernel_equals_attention_in_float64(tmp_path):
    """Every feature alone and combined; grouped, single and odd heads; one part and several; also rows without a context."""
    script = REPO / "benchmarks" / "gpu" / "kernel.py"
    done = run([sys.executable, str(script), str(tmp_path), "--device", "cpu", "--tiny"], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "kernel.json").read_text())
    assert len(report["checks"]) == 12 + 2 * 4, "every feature, and every launch at two sizes"
    assert all(check["ok"] for check in report["checks"])
    assert set(report["best"]) == {"2 x 40", "1 x 100"}


@pytest.mark.long
def test_the_kernel_compiles_to_efficient_machine_code(tmp_path):
    done = run([sys.executable, "-c", COMPILE], tmp_path)
    assert done.stdout.endswith("translated\n"), done.stderr[-3000:]
