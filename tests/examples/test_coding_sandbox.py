"""The sandbox of the coding example, with every method that works on this machine: what a command can and cannot do."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "agentic" / "coding"
sys.path.insert(0, str(FOLDER))

import sandbox as module  # noqa: E402
from sandbox import METHODS, Limits, NoSandboxError, Sandbox  # noqa: E402


@pytest.fixture(params=METHODS)
def box(request):
    try:
        return Sandbox(request.param)
    except NoSandboxError as error:
        pytest.skip(str(error))


def run(box, program, files=None, stdin=""):
    return asyncio.run(box.run(["python", "-c", program], files or {}, stdin))


def test_some_method_works_or_all_tests_are_skipped():
    try:
        assert Sandbox().method in METHODS
    except NoSandboxError as error:
        pytest.skip(str(error))


def test_a_program_reads_its_files_and_input_and_writes_its_folder(box):
    program = (
        "import sys, pathlib; pathlib.Path('new').write_text('n'); "
        "print(open('a/b.txt').read(), sys.stdin.read(), open('new').read())"
    )
    outcome = run(box, program, {"a/b.txt": "file"}, "input")
    assert (outcome.code, outcome.output, outcome.stopped) == (0, "file input n\n", "")


def test_exit_codes_and_both_streams_are_returned(box):
    outcome = run(box, "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)")
    assert (outcome.code, outcome.output) == (3, "out\nerr\n")


def test_nothing_outside_the_folder_can_be_written(box, tmp_path):
    places = [
        tmp_path,
        Path("/tmp"),
        Path("/var/tmp"),
        Path.home(),
        FOLDER,
        Path("/usr"),
        Path("/etc"),
        Path("/dev/shm"),
    ]
    places = [str(place / "areno-escape") for place in places] + ["/areno-escape", "../areno-escape"]
    program = f"""
for place in {places!r}:
    try:
        open(place, "w").close()
        print("WROTE", place)
    except OSError:
        pass
print("done")
"""
    assert run(box, program).output == "done\n"
    assert not [place for place in places[:-1] if os.path.exists(place)]


def test_system_files_cannot_be_changed_or_removed(box):
    program = f"""
import os
for change in (lambda p: os.chmod(p, 0o777), os.unlink, lambda p: os.truncate(p, 0), lambda p: os.rename(p, p + "x")):
    for place in ("/usr/bin/env", "/bin/sh", {os.path.realpath(sys.executable)!r}):
        try:
            change(place)
            print("CHANGED", place)
        except OSError:
            pass
print("done")
"""
    before = os.stat("/usr/bin/env")
    assert run(box, program).output == "done\n"
    assert os.stat("/usr/bin/env").st_ino == before.st_ino


def test_the_home_folder_and_other_files_cannot_be_read(box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("SECRET")
    secret.chmod(0o644)
    _open_to_others(tmp_path)
    program = f"""
import os
for place in ({str(secret)!r}, {str(FOLDER / "sandbox.py")!r}, "/etc/passwd", "/etc/shadow", "/proc/1/environ"):
    try:
        print("READ", place, open(place).read(6))
    except OSError:
        pass
for place in ({str(Path.home())!r}, os.path.expanduser("~root"), "/home", "/tmp", {str(tmp_path)!r}):
    try:
        names = set(os.listdir(place)) - {{".pyenv"}}
        names and print("LISTED", place, names)
    except OSError:
        pass
print("done")
"""
    assert run(box, program).output == "done\n"


def test_landlock_refuses_changes_of_metadata_and_of_other_processes(tmp_path):
    """Landlock itself does not, and without root the command has the user id of the other files and processes."""
    try:
        box = Sandbox("landlock")
    except NoSandboxError as error:
        pytest.skip(str(error))
    other = tmp_path / "other"
    other.write_text("x")
    other.chmod(0o600)
    before = other.stat()
    program = f"""
import os, resource
changes = {{
    "chmod": lambda p: os.chmod(p, 0o777), "chmod at": lambda p: os.chmod(p, 0o777, dir_fd=os.open(".", os.O_PATH)),
    "fchmod": lambda p: os.fchmod(os.open(p, os.O_RDONLY), 0o777), "chown": lambda p: os.chown(p, os.getuid(), -1),
    "lchown": lambda p: os.lchown(p, os.getuid(), -1), "utime": lambda p: os.utime(p, (1, 1)),
    "setxattr": lambda p: os.setxattr(p, "user.a", b"1"), "removexattr": lambda p: os.removexattr(p, "user.a"),
    "priority": lambda _: os.setpriority(os.PRIO_USER, 0, 1), "scheduler": lambda _: os.sched_setaffinity(0, {{0}}),
    "limits": lambda _: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)),
}}
for name, change in changes.items():
    for place in ("own", {str(other)!r}):
        try:
            change(place)
            print("CHANGED", name, place)
        except PermissionError:
            pass
print(resource.getrlimit(resource.RLIMIT_CORE), resource.prlimit(0, resource.RLIMIT_CORE))
"""
    assert run(box, program, {"own": ""}).output == "(0, 0) (0, 0)\n"
    after = other.stat()
    assert (after.st_mode, after.st_mtime, after.st_ctime) == (before.st_mode, before.st_mtime, before.st_ctime)


def test_the_callers_environment_variables_are_hidden(box, monkeypatch):
    monkeypatch.setenv("ARENO_TEST_SECRET", "SECRET")
    assert "SECRET" not in run(box, "import os; print(dict(os.environ))").output


def test_there_is_no_network(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        program = f"""
import socket
def attempt(what):
    try:
        what()
        print("REACHED")
    except OSError:
        pass
attempt(lambda: socket.create_connection(("127.0.0.1", {port}), 2).send(b"x"))
attempt(lambda: socket.create_connection(("1.1.1.1", 53), 2))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port})))
attempt(lambda: socket.socket(socket.AF_UNIX).connect("/run/docker.sock"))
attempt(lambda: socket.create_server(("0.0.0.0", 0)))
attempt(lambda: socket.getaddrinfo("example.org", 80))
print("done")
"""
        assert run(box, program).output == "done\n"
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_fork_bomb_is_killed_and_leaves_nothing(box):
    mark = f"bomb of {uuid.uuid4()}"  # unique, because other sandboxes run concurrently
    program = f"# {mark}\nimport os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    began = time.monotonic()
    outcome = run(Sandbox(box.method, Limits(seconds=1)), program)
    assert outcome.stopped == "time"
    assert time.monotonic() - began < 8
    assert _commands_with(mark) == []


def test_the_number_of_processes_is_limited(box):
    program = """
import os, time
made = 0
try:
    for _ in range(500):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except BlockingIOError:
    pass
print(made)
"""
    made = int(run(box, program).output)
    assert 5 < made < 64


def test_background_processes_end_with_their_command(box):
    mark = f"31.7{os.getpid()}"  # unique: this test may run concurrently for another method
    program = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(0); os.close(1); os.close(2)
        time.sleep({mark})
    os._exit(0)
print("left one")
"""
    assert run(box, program).output == "left one\n"
    assert _commands_with(mark) == []


def test_allocating_ten_gigabytes_fails(box):
    outcome = run(box, "try:\n    bytearray(10 * 2**30)\nexcept MemoryError:\n    print('refused')")
    assert outcome.output == "refused\n"


def test_the_memory_limit_applies_to_all_processes_together(box):
    # Each stays under its own limit.
    program = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        kept = bytearray(60 * 2**20)
        time.sleep(20)
time.sleep(20)
"""
    outcome = run(Sandbox(box.method, Limits(memory_bytes=200 * 2**20)), program)
    assert outcome.stopped == "memory"


def test_endless_loops_are_stopped(box):
    began = time.monotonic()
    outcome = run(Sandbox(box.method, Limits(seconds=1)), "print('begun', flush=True)\nwhile True: pass")
    assert outcome.output == "begun\n"
    assert outcome.stopped == "time" or outcome.code != 0  # the CPU time limit may be hit first
    assert time.monotonic() - began < 6


def test_a_sleeping_command_that_ignores_signals_is_stopped(box):
    program = "import signal, time\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"
    began = time.monotonic()
    assert run(Sandbox(box.method, Limits(seconds=1)), program).stopped == "time"
    assert time.monotonic() - began < 6


def test_the_sizes_of_files_and_folder_are_limited(box):
    big = "try:\n    open('f', 'wb').write(bytes(64 * 2**20))\nexcept OSError as error:\n    print(error.errno)"
    assert run(box, f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{big}").output == "27\n"
    many = "for n in range(1000):\n    open(f'{n}', 'wb').write(bytes(2**20))\nimport time; time.sleep(20)"
    assert _refused_for_the_disk(box, run(box, many))


def test_deleted_files_that_are_still_open_count_too(box):
    program = """
import os, time
kept = []
for n in range(200):
    kept.append(open(f"{n}", "wb"))
    kept[-1].write(bytes(2**20))
    kept[-1].flush()
    os.unlink(f"{n}")
time.sleep(20)
"""
    assert _refused_for_the_disk(box, run(box, program))


def _refused_for_the_disk(box, outcome):
    """With namespaces the folder's size is limited by its file system, so the command itself gets the error."""
    return "No space left on device" in outcome.output if box.method == "namespaces" else outcome.stopped == "disk"


def test_memory_that_belongs_to_no_process_is_refused(box):
    program = """
import ctypes, os, platform
x86 = platform.machine() == "x86_64"
libc = ctypes.CDLL(None, use_errno=True)
numbers = {
    "memfd_create": 319 if x86 else 279, "memfd_secret": 447, "shmget": 29 if x86 else 194,
    "semget": 64 if x86 else 190, "msgget": 68 if x86 else 186, "mq_open": 240 if x86 else 180,
    "request_key": 249 if x86 else 218, "add_key": 248 if x86 else 217, "keyctl": 250 if x86 else 219,
}
for name, number in numbers.items():
    ctypes.set_errno(0)
    result = libc.syscall(number, 0, 4096, 0o1600, 0)
    if result != -1 or ctypes.get_errno() != 1:
        print(name, result, ctypes.get_errno())
print("done")
"""
    assert run(box, program).output == "done\n"


def test_output_is_truncated(box):
    outcome = run(box, "print('x' * 2**22)")
    assert (outcome.code, len(outcome.output)) == (0, box.limits.output_bytes)


def test_other_processes_cannot_be_killed_or_traced(box):
    victim = subprocess.Popen(["sleep", "30"])
    try:
        program = f"""
import os, ctypes
for pid in ({victim.pid}, {os.getpid()}, os.getppid(), -1):
    try:
        os.kill(pid, 0 if pid == os.getppid() else {signal.SIGKILL:d})
    except OSError:
        pass
print(ctypes.CDLL(None).ptrace(16, {victim.pid}, 0, 0))
"""
        run(box, program)
        time.sleep(0.1)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_privileges_cannot_be_regained(box):
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid() != 0, [libc.mount(b"none", b"/", None, 32, None), libc.unshare(0x10000000), libc.setuid(0)])
header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
print(libc.capget(header, held), list(held))
"""
    assert run(box, program).output == f"True [-1, -1, -1]\n0 {[0] * 6}\n"


def test_concurrent_commands_do_not_see_each_others_files(box):
    async def many():
        program = "import os; print(sorted(os.listdir('.')))"
        return await asyncio.gather(*(box.run(["python", "-c", program], {f"file{n}": ""}) for n in range(6)))

    assert [outcome.output for outcome in asyncio.run(many())] == [f"['file{n}']\n" for n in range(6)]


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1, 0.5])
def test_a_cancelled_run_leaves_nothing(box, after_s, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _open_to_others(tmp_path)
    mark = f"cancelled {uuid.uuid4()}"

    async def cancelled():
        running = asyncio.create_task(box.run(["python", "-c", f"import time; time.sleep(32.3)  # {mark}"], {}))
        await asyncio.sleep(after_s)
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()  # as if its event loop ended meanwhile
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert _commands_with(mark) == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_ends_when_the_trainer_is_killed(box, tmp_path):
    _open_to_others(tmp_path)
    mark = f"orphan {uuid.uuid4()}"
    command = f"import os, time  # {mark}\nos.fork() or os.setsid()\nprint('up', flush=True)\ntime.sleep(600)"
    program = (
        f"import asyncio, sys\nsys.path.insert(0, {str(FOLDER)!r})\nfrom sandbox import Limits, Sandbox\n"
        f"box = Sandbox({box.method!r}, Limits(seconds=600))\nasyncio.run(box.run(['python', '-c', {command!r}], {{}}))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as trainer:
        # The trainer, the processes of the sandbox, and the command with its child.
        assert _soon(lambda: len(_commands_with(mark)) >= 4)
        trainer.kill()
    assert _soon(lambda: _commands_with(mark) == [])


def _open_to_others(folder):
    """As root, commands run as another user, who must be able to read the folder."""
    for place in (folder, *folder.parents):
        if place.stat().st_uid == os.getuid() and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o055)


def _soon(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_without_a_sandbox_nothing_runs(monkeypatch):
    monkeypatch.setattr(module, "METHODS", ())
    module.working_method.cache_clear()
    try:
        with pytest.raises(NoSandboxError, match=r"no command is run.*Install bubblewrap"):
            Sandbox()
    finally:
        module.working_method.cache_clear()


def _commands_with(text):
    """Command lines of processes, without zombies, that contain a text."""
    commands = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in command and int(entry) != os.getpid():
            commands.append(command)
    return commands
