"""Only one process at a time writes to a run, and its end releases the lock, even if it is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from areno.errors import UsageError
from areno.storage import run_lock as module
from areno.storage.run_lock import run_lock

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from areno.storage.run_lock import run_lock
with run_lock(Path(sys.argv[1]), "or choose another"):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    spawned = subprocess.Popen(sleeper, stdout=subprocess.DEVNULL, close_fds=False)
    runs, tell = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(tell, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(runs, 1)  # a child that is yet to run has the lock's file open
    print(spawned.pid, forked, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of ``tmp_path / "run"``, and the ids of its children, which outlive it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    children = [int(word) for word in process.stdout.readline().split()]
    yield process, children
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_naming_the_holder_and_a_kill_releases_the_lock(tmp_path, holder):
    process, children = holder
    with (
        pytest.raises(
            UsageError,
            match=rf"^process {process.pid} on {socket.gethostname()} is writing to .*run; .*or choose another",
        ),
        run_lock(tmp_path / "run", "or choose another"),
    ):
        raise AssertionError("must not be reached")
    process.kill()
    process.wait()
    assert all(os.path.exists(f"/proc/{pid}") for pid in children)  # but none of them keeps the lock
    with run_lock(tmp_path / "run", "or choose another"):
        assert f"process {os.getpid()}" in (tmp_path / "run" / ".lock").read_text()
    assert (tmp_path / "run" / ".lock").read_text() == ""


def test_the_lock_also_holds_within_one_process_and_ends_with_its_block(tmp_path):
    for _ in range(2):
        with run_lock(tmp_path, ""), pytest.raises(UsageError, match=f"process {os.getpid()}"), run_lock(tmp_path, ""):
            raise AssertionError("must not be reached")


def test_of_processes_that_start_together_one_gets_the_lock(tmp_path):
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(tmp_path), str(time.time() + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    answers = [process.stdout.readline().strip() for process in starters]  # the winner holds it meanwhile
    for process in starters:
        process.communicate(timeout=60)
    assert sorted(answers) == ["got it", "refused", "refused", "refused"]


START = """
import sys, time
from pathlib import Path
from areno.errors import UsageError
from areno.storage.run_lock import run_lock
time.sleep(max(0, float(sys.argv[2]) - time.time()))
try:
    with run_lock(Path(sys.argv[1]), ""):
        print("got it", flush=True)
        sys.stdin.read()
except UsageError:
    print("refused")
"""


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, caplog):
    # A test cannot mount a file system without locks.
    def refuse(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with run_lock(tmp_path, ""):
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No locks available" in caplog.text


def test_an_unwritable_run_directory_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file.*or choose another"), run_lock(tmp_path / "file", "or choose another"):
        raise AssertionError("must not be reached")
