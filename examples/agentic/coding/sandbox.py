"""Sandbox for programs that a model wrote. It runs short commands, each on its own files, which are discarded afterwards.

A command sees the system's programs and libraries (read-only) and a folder with its files. A command cannot reach the
network, other processes or other files (with Landlock, ``stat`` of other paths still works). Its time, memory, processes,
file sizes and output are limited. The module tries bubblewrap, namespaces and Landlock in this order, each with a test
command. If no method works, it raises :class:`NoSandboxError`. As root, commands run under an unused user id.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pwd
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from confine import descendants, kill_descendants, runs

from areno.errors import ArenoError, UsageError

METHODS = ("bubblewrap", "namespaces", "landlock")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_CONFINE = Path(__file__).with_name("confine.py")
_LOOK_EVERY_S = 0.05
_END_S = 30.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class NoSandboxError(UsageError):
    """No sandbox works on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a command.

    Attributes:
        seconds: wall-clock time of the command, and CPU time of each process.
        memory_bytes: memory of all processes together, and address space of each process.
        file_bytes: size of each file.
        disk_bytes: total size of all files in the command's folder and of open files without a name.
        processes: number of processes and threads.
        output_bytes: maximum size of the recorded output.
    """

    seconds: int = 10
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 8 * 2**20
    disk_bytes: int = 32 * 2**20
    processes: int = 32
    output_bytes: int = 16 * 2**10


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a command.

    Attributes:
        code: exit code; negative if a signal terminated the command.
        output: output of the command, standard error included.
        stopped: limit that stopped the command (``time``, ``memory`` or ``disk``), or empty. With namespaces, a command
        that exceeds the disk limit continues, but its write fails.
    """

    code: int
    output: str
    stopped: str = ""


class Sandbox:
    """Runs commands with one method of isolation.

    Args:
        method: one of :data:`METHODS`; by default the first method that works.
        limits: limits of each command.

    Raises:
        NoSandboxError: the method does not work on this machine; the message says why.
    """

    def __init__(self, method: str | None = None, limits: Limits | None = None) -> None:
        self.method = method or working_method()
        self.limits = limits or Limits()
        self.python = _python(self.method)
        if method is not None and (problem := _problem(method)):
            raise NoSandboxError(f"{method} does not work on this machine: {problem}")

    async def run(self, command: Sequence[str], files: Mapping[str, str], given: str = "") -> Outcome:
        """Run a command in a temporary folder with the given files.

        Args:
            command: program and arguments; ``python`` stands for the interpreter.
            files: content of each file, by path in the folder; the command's changes are discarded.
            given: standard input of the command.
        """
        async with _turn():
            with _workspace(files) as (folder, user):
                arguments = self._arguments(list(command), folder, user)
                starting = asyncio.ensure_future(
                    asyncio.create_subprocess_exec(
                        *arguments,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        cwd="/",
                        env={},
                    )
                )
                try:
                    return await _watch(await asyncio.shield(starting), folder, given, self.limits)
                finally:
                    await _ended(starting)

    def _arguments(self, command: list[str], folder: Path, user: int | None) -> list[str]:
        if command[0] == "python":
            command[0] = self.python
        visible = [*(path for path in _SYSTEM if os.path.exists(path)), *_installation(self.python)]
        settings = {
            "method": self.method,
            "command": command,
            "workspace": str(folder),
            "visible": visible,
            "user": user,
            "parent": os.getpid(),
            "seconds": self.limits.seconds,
            "bytes": self.limits.memory_bytes,
            "file_bytes": self.limits.file_bytes,
            "disk_bytes": self.limits.disk_bytes,
            "processes": self.limits.processes,
        }
        confined = [self.python, "-I", "-S", "-c", _CONFINE.read_text(encoding="utf-8"), json.dumps(settings)]
        return [*_bubblewrap(visible, folder), *confined] if self.method == "bubblewrap" else confined


@functools.cache
def working_method() -> str:
    """Return the first method that works on this machine.

    Raises:
        NoSandboxError: no method works; the message says why.
    """
    problems = {}
    for method in METHODS:
        problems[method] = _problem(method)
        if not problems[method]:
            return method
    raise NoSandboxError(
        "no sandbox works on this machine, so no command is run: "
        + "; ".join(f"{method}: {problem}" for method, problem in problems.items())
        + ". Install bubblewrap, allow unprivileged user namespaces, or use Linux 6.12 with Landlock"
    )


@functools.cache
def _problem(method: str) -> str:
    """Return why a method does not work on this machine; empty if it works."""
    if sys.platform != "linux":
        return f"it needs Linux, but this is {sys.platform}"
    if method == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    sandbox = object.__new__(Sandbox)
    sandbox.method, sandbox.limits, sandbox.python = method, Limits(), _python(method)
    program = "import os; pid = os.fork(); pid or os._exit(0); os.wait(); open('f', 'w'); print('works')"

    def probe() -> Outcome:
        return asyncio.run(sandbox.run(["python", "-c", program], {}))

    # Runs in a separate thread, because the caller may be in an event loop.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(probe).result()
    if outcome.output == "works\n":
        return ""
    return (outcome.output.strip().splitlines() or [f"exit code {outcome.code}"])[-1]


def _python(method: str) -> str:
    """Return the current interpreter, or the system's interpreter if the current one is in a private folder."""
    own = os.path.realpath(sys.executable)
    closed = any(not folder.stat().st_mode & stat.S_IXOTH for folder in Path(own).parents)
    # Mounts are made as root, so only with Landlock must another user be able to reach the path.
    return "/usr/bin/python3" if method == "landlock" and os.getuid() == 0 and closed else own


def _installation(python: str) -> list[str]:
    """Return the folders of an interpreter that are not system folders."""
    prefix = str(Path(os.path.realpath(python)).parents[1])
    return [] if prefix in ("/", "/usr") else [prefix]


def _bubblewrap(visible: Sequence[str], folder: Path) -> list[str]:
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    rights = ["--cap-drop", "ALL"]
    if os.getuid() == 0:  # confine.py changes the user
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        spaces += ["--unshare-user"]
    above = sorted({str(parent) for path in visible for parent in Path(path).parents} - {"/"})
    mounts = [part for path in above for part in ("--perms", "0755", "--dir", path)]
    mounts += [part for path in visible for part in ("--ro-bind", path, path)]
    mounts += [part for name in ("null", "zero", "random", "urandom") for part in ("--dev-bind", *[f"/dev/{name}"] * 2)]
    mounts += ["--bind", str(folder), "/work", "--chdir", "/work", "--remount-ro", "/"]
    return [shutil.which("bwrap") or "bwrap", *spaces, *rights, "--die-with-parent", "--new-session", *mounts]


@contextlib.contextmanager
def _workspace(files: Mapping[str, str]) -> Iterator[tuple[Path, int | None]]:
    """Create a folder with files; yield the folder's path and, if the folder belongs to another user, this user's id."""
    user = _free_user() if os.getuid() == 0 else None
    outer = Path(tempfile.mkdtemp(prefix="areno-sandbox-"))
    outer.chmod(0o755)
    folder = outer / "work"
    (outer / "work.root").mkdir(parents=True)
    try:
        folder.mkdir()
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        if user is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user, user)
        yield folder, user
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _free_user() -> int:
    while True:
        user = random.SystemRandom().randrange(20_000, 60_000)
        try:
            pwd.getpwuid(user)
        except KeyError:
            return user


_turns: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


def _turn() -> asyncio.Semaphore:
    """Return a semaphore that lets one command per CPU run at a time, so that time limits mean the same for all commands."""
    loop = asyncio.get_running_loop()
    for other in [each for each in _turns if each.is_closed()]:
        del _turns[other]
    return _turns.setdefault(loop, asyncio.Semaphore(os.cpu_count() or 1))


async def _watch(process: asyncio.subprocess.Process, folder: Path, given: str, limits: Limits) -> Outcome:
    """Wait until the command has exited or exceeds a limit."""
    output = bytearray()
    reading = asyncio.create_task(_read(process, given, output, limits.output_bytes))
    loop = asyncio.get_running_loop()
    deadline, stopped = loop.time() + limits.seconds, ""
    while not stopped:
        done, _ = await asyncio.wait((reading,), timeout=_LOOK_EVERY_S)
        if done:
            break
        if loop.time() > deadline:
            stopped = "time"
        elif _memory(process.pid) > limits.memory_bytes:
            stopped = "memory"
        elif _size(folder) + _nameless(process.pid) > limits.disk_bytes:
            stopped = "disk"
    await _end(process)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(reading, 1)
    return Outcome(process.returncode or 0, output.decode(errors="replace"), stopped)


async def _read(process: asyncio.subprocess.Process, given: str, output: bytearray, most: int) -> None:
    """Write the input, record the output up to a maximum size, and wait until the command has exited."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(given.encode())
        await process.stdin.drain()
        process.stdin.close()
    while piece := await process.stdout.read(2**16):
        output += piece[: most - len(output)]
    await process.wait()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the remaining processes, and wait until all of them have exited."""
    if process.returncode is not None:  # the supervising process ends after all others
        return
    left = kill_descendants(process.pid, itself=True)
    deadline = asyncio.get_running_loop().time() + _END_S
    while left or process.returncode is None:
        await asyncio.sleep(0.01)
        left = {pid for pid in left if runs(pid)}
        if asyncio.get_running_loop().time() > deadline:
            raise ArenoError(f"processes {sorted(left)} of a command do not exit, although they were killed")


async def _ended(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Run :func:`_end` for a process that may still be starting, even if the task is cancelled in the meantime."""

    async def end() -> None:
        await _end(await starting)

    ending, cancelled = asyncio.ensure_future(end()), None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _memory(pid: int) -> int:
    """Return the memory of a process's descendants, in bytes."""
    total = 0
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE
    return total


def _nameless(pid: int) -> int:
    """Return the size in bytes of deleted files that a process's descendants still have open."""
    found: dict[tuple[int, int], int] = {}
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{each}/fd"):
                with contextlib.suppress(OSError):
                    about = entry.stat()
                    if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                        found[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(found.values())


def _size(folder: Path) -> int:
    """Return the size of the files in a folder, in bytes."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
