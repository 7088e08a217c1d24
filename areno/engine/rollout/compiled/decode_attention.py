"""Our attention kernel for decode steps on a CPU: ``decode_attention.cpp``, its operator, and how it is built and loaded.

PyTorch's fused attention looks at every column of a padded batch; this one at those of each context. For 256 rows of 80
columns on two cores it takes a third of the time. It is built with the decode step that calls it, takes seconds, and lies
beside it on disk. Where it cannot be built, the step uses PyTorch's.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from areno.cache_folder import cache_folder
from areno.engine.model.attention import LayerAttention
from areno.engine.rollout.compiled.processor import processor

_SOURCE = Path(__file__).with_suffix(".cpp")
# Vectorised sums and exponentials; linking must not see them, or loading would turn denormal numbers off everywhere.
_FAST = (
    "-O3",
    *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
    "-march=native",
    "-ffast-math",
    "-fopenmp-simd",
    "-fPIC",
    "-std=c++20",
    "-c",
)
# The stable ABI of PyTorch 2.10.
_TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
_SCHEMA = "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor positions, float scale, int window) -> Tensor"

_LIBRARY = torch.library.Library("areno", "FRAGMENT")
_LIBRARY.define(_SCHEMA)
_loaded: set[str] = set()


@torch.library.register_fake("areno::decode_attention", lib=_LIBRARY)
def _shape(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], values.shape[3])


def path() -> Path:
    """Where the built kernel lies, or will lie."""
    parts = [_SOURCE.read_text(encoding="utf-8"), *_FAST, torch.__version__, processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder("kernels") / f"decode_attention-{digest[:32]}.so"


def build() -> str:
    """Build it if it is not there; returns why that failed, or ""."""
    target = path()
    if target.exists():
        return ""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    root = Path(torch.__file__).parent
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    with TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
        compiled, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        libraries = (f"-L{root / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10")
        commands = [
            [compiler, *_FAST, _TARGET, f"-I{root / 'include'}", str(_SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-o", str(linked), *libraries, *undefined],
        ]
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                return str(error)
            if done.returncode:
                return (done.stderr.strip().splitlines() or ["the compiler failed"])[0]
        os.replace(linked, target)
    return ""


def load() -> bool:
    """Make the operator callable in this process; False where it has not been built."""
    target = path()
    if target.name not in _loaded and target.exists():
        torch.ops.load_library(str(target))
        _loaded.add(target.name)
    return target.name in _loaded


def takes(layer: LayerAttention, q: Tensor) -> bool:
    """Whether it computes what a layer asks for."""
    plain = layer.sinks is None and layer.softcap is None and not layer.explicit
    return plain and q.dtype in (torch.float32, torch.bfloat16)


def decode_attention(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attention of one new token per row.

    Args:
        layer: one that :func:`takes` accepts.
        q: [B, H, D], features contiguous.
        keys, values: caches [slots, K, columns, D] and [slots, K, columns, Dv]; rows are the first B slots.
        positions: of the new tokens, which are in the cache already [B] int64.

    Returns:
        [B, H, Dv].
    """
    return torch.ops.areno.decode_attention(q, keys, values, positions, layer.scale, layer.window or 0)
