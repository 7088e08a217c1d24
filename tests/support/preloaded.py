"""Programs in processes forked from one with all imports done: real signals and exits, without seconds of imports.

A separate process (``python -m tests.support.preloaded SOCKET``) imports what runs import and then forks itself for each
program: the command line, or a rank of a group. Variables that are read at import, such as ``HF_HOME``, keep the values they
had when that process started; a program whose environment differs in such a variable gets a new interpreter (``fits``).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

_IMPORTS = (
    "torch",
    "torch._dynamo",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "pyarrow.dataset",
    "torch.utils.tensorboard",
    "areno.cli.main",
    "areno.api.run_training",
    "areno.api.backend.local",
    "areno.api.trainers.supervised",
    "areno.api.trainers.ppo",
    "areno.engine.engine",
    "areno.engine.parallel.server",
    "areno.engine.parallel.fsdp",
    "areno.experiments.run_experiment",
)
# Libraries read variables with these prefixes when they are imported.
_READ_AT_IMPORT = (
    "HF_",
    "TRANSFORMERS_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "TORCH",
    "ATEN_",
    "ONEDNN_",
    "TRITON_",
    "LD_",
    "CUDA_",
)
_START_S = 120.0
_ADDRESS = "ARENO_TEST_PRELOADED"
_LINK = "ARENO_LINK"  # as in areno.launch.links, which this module does not import itself


class Forked:
    """A process forked by a ``Preloaded``, with the part of the interface of ``subprocess.Popen`` that tests use."""

    ranks: ClassVar[weakref.WeakSet[Forked]] = weakref.WeakSet()

    def __init__(self, link: socket.socket, stdout: IO[str] | None = None) -> None:
        self._link = link
        self._waiting = threading.Lock()
        self.stdout = stdout
        digits = b""
        while (digit := link.recv(1)) not in (b"\n", b""):
            digits += digit
        self.pid = int(digits)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._waiting.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise subprocess.TimeoutExpired(["areno"], timeout or 0.0)
        try:
            if self.returncode is None:
                self._link.settimeout(None if timeout is None else max(timeout, 0.001))
                self.returncode = int(self._link.recv(16))
            return self.returncode
        except TimeoutError:
            raise subprocess.TimeoutExpired(["areno"], timeout or 0.0) from None
        finally:
            self._waiting.release()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; returns the rest of the output."""
        output: list[str] = []
        reader = threading.Thread(target=lambda: output.append(self.stdout.read() if self.stdout else ""), daemon=True)
        reader.start()
        self.wait(timeout)
        reader.join(timeout)
        if reader.is_alive():  # one of its child processes keeps the pipe open
            raise subprocess.TimeoutExpired(["areno"], timeout or 0.0)
        return output[0], None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since; subprocess.Popen ignores it, too
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkedRank(Forked):
    """One of a group's worker processes."""

    node = ""

    def __init__(self, link: socket.socket) -> None:
        super().__init__(link)
        self.ranks.add(self)


class Preloaded:
    """The process that has imported everything; it ends with the process that started it.

    Programs forked from it receive its ``address``, so that they do not start another one.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self.address = os.environ.get(_ADDRESS, "")
        if self.address:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="areno-preloaded-")
        self.address = str(Path(self._folder.name) / "socket")
        command = [sys.executable, "-m", __name__, self.address]
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, cwd=root)
        atexit.register(self._close)

    def fits(self, environment: Mapping[str, str], ignoring: frozenset[str] = frozenset()) -> bool:
        """Whether a program with this environment may be forked; it applies the variables ``ignoring`` itself."""
        differ = {key for key, _ in environment.items() ^ self._environment.items()} - ignoring
        return not any(key.startswith(_READ_AT_IMPORT) for key in differ)

    def fork(
        self,
        program: str,
        arguments: list[str],
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        *files: int,  # at most one
        folder: str | None = None,
    ) -> socket.socket:
        """Run a module like ``python -m``, or a program file; the socket sends its process id and, at the end, its exit status.

        The number of an inherited file is in the environment, as a rank expects it. The default ``folder`` is the current one.
        """
        link = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                link.connect(self.address)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                ended = self._process is None or self._process.poll() is not None
                assert not ended, "the preloaded process has ended"
                assert time.monotonic() < deadline, "the preloaded process does not answer"
                time.sleep(0.05)
        request: dict[str, Any] = {"program": program, "arguments": arguments, "folder": folder or os.getcwd()}
        request["environment"] = {**environment, _ADDRESS: self.address}
        data = json.dumps(request).encode()
        socket.send_fds(link, [len(data).to_bytes(8, "big")], [stdout, stderr, *files])
        link.sendall(data)
        return link

    def _close(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _serve(address: str) -> None:
    for name in _IMPORTS:
        importlib.import_module(name)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if set(threads[1:]) - {"jemalloc_bg_thd"}:  # of pyarrow's allocator, which handles forks
        raise SystemExit(f"threads after the imports, which a fork would lose: {threads}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the processes of _mind
    gc.freeze()  # or garbage collections in the forked processes would copy all pages
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    listener.settimeout(0.5)
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            link, _ = listener.accept()
            link.settimeout(None)
            if os.fork() == 0:
                listener.close()
                _mind(link)
            link.close()


def _mind(link: socket.socket) -> None:
    """Fork once more, and report how that process ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, handles, _, _ = socket.recv_fds(link, 8, 8)
    data = b""
    while len(data) < int.from_bytes(head, "big"):
        data += link.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        link.close()
        _become(json.loads(data), handles)
    for handle in handles:
        os.close(handle)
    link.sendall(f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        link.sendall(str(status).encode())
    os._exit(0)


def _become(request: dict[str, Any], handles: list[int]) -> NoReturn:
    for number, handle in zip((1, 2), handles[:2], strict=True):
        os.dup2(handle, number)
        os.close(handle)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if handles[2:]:
        os.environ[_LINK] = str(handles[2])
    program = request["program"]
    sys.argv = [program, *request["arguments"]]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0] = request["folder"]  # as with -m
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
