"""Compile and load the C++ sources of this folder, and cache the compiled libraries on disk.

If a source file cannot be compiled, areno uses PyTorch's own implementation instead.
"""

import hashlib
import logging
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
from areno.compiler import compiler_command

logger = logging.getLogger(__name__)

_ON_X86 = platform.machine() in ("x86_64", "AMD64")
_THIS_PROCESSOR = ("-march=native", "-mprefer-vector-width=512") if _ON_X86 else ("-mcpu=native",)
# Vectorized sums and exponentials. These flags are for compiling only: at linking, they would disable denormal numbers in the
# whole process.
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
    """A C++ source file, and the operators that the file implements in the namespace ``areno``.

    Args:
        name: name of the source file, without its suffix.
        schemas: PyTorch schemas of the operators.
        stable_abi: whether to compile against PyTorch's stable ABI instead of the ABI of the installed version.
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
        """Return the path of the compiled library. The file may not exist yet."""
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
        """Compile the library if its file does not exist. Return the reason for a failure; "" on success."""
        try:
            target = self.path()
            return planted_problem(target) if target.exists() else self._build(target)
        except OSError as error:  # no compiler, or no cache folder
            return str(error)

    def _build(self, target: Path) -> str:
        with building_folder(target) as folder:
            compiled, linked = folder / "kernel.o", folder / "kernel.so"
            for command in _commands(self._source, self._flags, compiled, linked):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    return (done.stderr.strip().splitlines() or ["the compiler failed without a message"])[0]
            os.replace(linked, target)
        return ""

    def load(self) -> bool:
        """Load the compiled library, unless the file is missing, or another user could have changed it.

        Return whether the operators can be called.
        """
        try:
            target = self.path()
            if target.name not in self._loaded and target.exists() and not planted_problem(target):
                torch.ops.load_library(str(target))
                self._loaded.add(target.name)
        except OSError as error:  # such as a cache folder of another user, or on a file system without executable files
            logger.debug("the kernel library %s cannot be loaded: %s", self.name, error)
        return self.loaded

    @property
    def loaded(self) -> bool:
        """Whether the operators can be called."""
        return bool(self._loaded)


def load_all(kernels: Sequence[KernelLibrary]) -> str:
    """Compile missing libraries concurrently, then load all libraries. Return the reason for a failure; "" on success."""
    with ThreadPoolExecutor(len(kernels)) as pool:
        problem = next(filter(None, pool.map(KernelLibrary.build, kernels)), "")
    if problem:
        return problem
    unloaded = [kernel.name for kernel in kernels if not kernel.load()]
    return f"the compiled kernels {', '.join(unloaded)} could not be loaded" if unloaded else ""


def processor() -> str:
    """Return the operating system, the processor type and the processor's features as text.

    This text affects the file names of compiled libraries, so machines with different processors can share a cache folder.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return f"{platform.system()} {platform.machine()} {platform.processor()} {flags.group(1) if flags else ''}"


def compiler_missing() -> str:
    """Return the reason why this machine cannot compile C++; "" if the machine has a C++ compiler."""
    compiler = compiler_command()[0]
    if shutil.which(compiler):
        return ""
    return f"the C++ compiler {compiler!r} is not installed; for faster decoding, install g++, or set CXX to another compiler"


def _commands(source: Path, flags: Sequence[str], compiled: Path, linked: Path) -> list[list[str]]:
    root = Path(torch.__file__).parent
    undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    libraries = (f"-L{root / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10")
    return [
        [*compiler_command(), *flags, f"-I{root / 'include'}", str(source), "-o", str(compiled)],
        [*compiler_command(), "-shared", str(compiled), "-o", str(linked), *libraries, *undefined],
    ]
