"""Processes started by a reward function end with its worker, and workers end with the program, even if it is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from areno.rewards import RewardRunner


def _values(outcomes):
    return [outcome.value for outcome in outcomes]


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_killing_a_worker_kills_the_processes_that_its_function_started(reward_file, records, tmp_path):
    path = reward_file(f"""
        import subprocess
        def reward_fn(record):
            child = subprocess.Popen(["sleep", "600"])
            with open({str(tmp_path / "pid")!r}, "w") as file:
                file.write(str(child.pid))
            child.wait()
    """)
    with RewardRunner(path=path, timeout_s=1, workers=1, on_error="drop") as runner:
        assert runner.run(records("x"))[0].value is None
        assert _wait_until(lambda: not _alive(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize("work", ["time.sleep(600)", "re.match(r'(a+)+$', 'a' * 60 + 'b')"])
def test_workers_and_their_children_die_with_a_killed_parent(reward_file, tmp_path, work):
    path = reward_file(f"""
        import os, re, subprocess, time
        def reward_fn(record):
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with open({str(tmp_path / "partial")!r}, "w") as file:
                file.write(f"{{os.getpid()}} {{child.pid}}")
            os.rename({str(tmp_path / "partial")!r}, {str(tmp_path / "pids")!r})
            {work}
    """)
    script = tmp_path / "parent.py"
    # The script has no `if __name__ == "__main__"`: workers must not import it again.
    script.write_text(
        textwrap.dedent(f"""
        from areno.rewards import RewardRunner
        from areno.types import RewardRecord
        print("started", flush=True)
        RewardRunner(path={path!r}, timeout_s=600, workers=1).run([RewardRecord()])
    """)
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert _wait_until((tmp_path / "pids").exists, 20)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(_alive(pid) for pid in pids)
    finally:
        parent.send_signal(signal.SIGKILL)
    assert parent.communicate()[0] == "started\n"
    assert _wait_until(lambda: not any(_alive(pid) for pid in pids))


def test_killed_workers_are_replaced_whether_idle_or_busy(reward_file, records, tmp_path, caplog):
    path = reward_file(f"""
        import os, signal
        def reward_fn(record):
            if record.completion == "pid":
                return os.getpid()
            if record.completion == "kill once" and not os.path.exists({str(tmp_path / "killed")!r}):
                open({str(tmp_path / "killed")!r}, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return 1
    """)
    with RewardRunner(path=path, timeout_s=10, workers=1) as runner:
        idle = int(runner.run(records("pid"))[0].value)
        os.kill(idle, signal.SIGKILL)
        assert _wait_until(lambda: not _alive(idle))
        assert _values(runner.run(records("a", "b"))) == [1.0, 1.0]
        assert "idle reward worker replaced: its worker process died (SIGKILL)" in caplog.text
        assert _values(runner.run(records("a", "kill once", "b"))) == [1.0, 1.0, 1.0]
        assert "record 2 is retried" in caplog.text


_DAEMON = """
    import os, subprocess, time
    def daemon(path):
        "A process with a session of its own, whose parent ends at once."
        program = (
            "import os, sys, time\\n"
            "if os.fork() == 0:\\n"
            "    os.setsid()\\n"
            "    if os.fork() == 0:\\n"
            f"        open({path!r} + '~', 'w').write(str(os.getpid()))\\n"
            f"        os.rename({path!r} + '~', {path!r})\\n"
            "        time.sleep(600)\\n"
            "os._exit(0)\\n"
        )
        subprocess.run([__import__("sys").executable, "-c", program], check=True)
        while not os.path.exists(path):
            time.sleep(0.01)
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "os.kill(os.getpid(), 9)", "return 1"])
def test_daemons_of_a_reward_function_end_with_its_worker(reward_file, records, tmp_path, end):
    path = reward_file(f"""{_DAEMON}
    def reward_fn(record):
        if not os.path.exists({str(tmp_path / "pid")!r}):
            daemon({str(tmp_path / "pid")!r})
        {end}
    """)
    with RewardRunner(path=path, timeout_s=3, workers=1, on_error="drop") as runner:
        runner.run(records("x"))
        pid = int((tmp_path / "pid").read_text())
        if end != "return 1":
            assert not _alive(pid), "the daemon ends before its worker is replaced"
    assert not _alive(pid)
