"""A C++ source of this folder, often of PyTorch operators: built when it is first needed, and kept on disk.

Where it cannot be built, PyTorch's own operators and memory serve.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from areno.cache_folder import building_folder, cache_folder, planted_problem

_ON_X86 = platform.machine() in ("x86_64", "AMD64")
_THIS_PROCESSOR = ("-march=native", "-mprefer-vector-width=512") if _ON_X86 else ("-mcpu=native",)
# Vectorised sums and exponentials; linking must not see them, or loading would turn denormal numbers off everywhere.
_FAST = (
    "-O3",
    *_THIS_PROCESSOR,
    "-ffast-math",
    "-fopenmp-simd",
    "-fPIC",
    "-std=c++20",
    "-c",
)
# The stable ABI of PyTorch 2.10.
_TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"


class KernelLibrary:
    """One source and the operators in the namespace ``areno`` that it implements.

    Args:
        name: of the source, without its ending.
        schemas: of the operators.
        stable_abi: build against PyTorch's stable ABI; False is against its own, which each version has anew.
    """

    def __init__(self, name: str, *schemas: str, stable_abi: bool = True) -> None:
        self.name = name
        self._flags = (*_FAST, _TARGET) if stable_abi else _FAST
        self._source = Path(__file__).with_name(f"{name}.cpp")
        self._loaded: set[str] = set()
        self.declared = torch.library.Library("areno", "FRAGMENT")
        for schema in schemas:
            self.declared.define(schema)

    def path(self) -> Path:
        """Where the built kernel lies, or will lie."""
        sources = [self._source, *sorted(self._source.parent.glob("*.h"))]
        parts = [
            *(source.read_text(encoding="utf-8") for source in sources),
            *self._flags,
            torch.__version__,
            processor(),
        ]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return cache_folder("kernels") / f"{self.name}-{digest[:32]}.so"

    def build(self) -> str:
        """Build it if it is not there; returns why that failed, or ""."""
        target = self.path()
        if target.exists():
            return planted_problem(target)
        try:
            return self._build(target)
        except OSError as error:  # no compiler, or no folder to keep it in
            return str(error)

    def _build(self, target: Path) -> str:
        with building_folder(target) as folder:
            compiled, linked = folder / "kernel.o", folder / "kernel.so"
            for command in _commands(self._source, self._flags, compiled, linked):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    return (done.stderr.strip().splitlines() or ["the compiler failed"])[0]
            os.replace(linked, target)
        return ""

    def load(self) -> bool:
        """Make the operator callable in this process; False where it has not been built."""
        target = self.path()
        if target.name not in self._loaded and target.exists() and not planted_problem(target):
            torch.ops.load_library(str(target))
            self._loaded.add(target.name)
        return self.loaded

    @property
    def loaded(self) -> bool:
        """Whether the operator can be called."""
        return bool(self._loaded)


def load_all(kernels: Sequence[KernelLibrary]) -> str:
    """Build those that are missing, at the same time, and load all; returns why one cannot be used, or ""."""
    with ThreadPoolExecutor(len(kernels)) as pool:
        problem = next(filter(None, pool.map(KernelLibrary.build, kernels)), "")
    if problem:
        return problem
    unloaded = [kernel.name for kernel in kernels if not kernel.load()]
    return f"{', '.join(unloaded)} could not be loaded" if unloaded else ""


def processor() -> str:
    """Names what this processor can do, so that a cache folder shared between machines tells them apart."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return f"{platform.system()} {platform.machine()} {platform.processor()} {flags.group(1) if flags else ''}"


def compiler_missing() -> str:
    """Why nothing can be compiled on this machine; "" if it can."""
    compiler = _compiler()
    if shutil.which(compiler):
        return ""
    return f"there is no C++ compiler {compiler!r} here; install g++, or set CXX, for faster decoding"


def _compiler() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _commands(source: Path, flags: Sequence[str], compiled: Path, linked: Path) -> list[list[str]]:
    """Compile, and link."""
    root = Path(torch.__file__).parent
    undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    libraries = (f"-L{root / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10")
    return [
        [_compiler(), *flags, f"-I{root / 'include'}", str(source), "-o", str(compiled)],
        [_compiler(), "-shared", str(compiled), "-o", str(linked), *libraries, *undefined],
    ]
