"""Reward files in worker processes: order, errors, deadlines, deaths."""

import time

import pytest

from areno.errors import RewardError, UsageError
from areno.rewards import RewardRunner


def _values(outcomes):
    return [outcome.value for outcome in outcomes]


def test_values_are_returned_in_the_order_of_the_records(reward_file, records):
    path = reward_file("""
        import time
        def reward_fn(record):
            time.sleep(float(record.completion))
            return float(record.completion)
    """)
    with RewardRunner(path=path, timeout_s=10, workers=2) as runner:
        assert _values(runner.run(records("0.2", "0", "0.1", "0.05"))) == [0.2, 0.0, 0.1, 0.05]
        assert runner.run([]) == []


def test_function_can_be_named_after_the_file(reward_file, records):
    path = reward_file("def mine(record): return 3")
    with RewardRunner(path=f"{path}:mine", timeout_s=10, workers=1) as runner:
        assert _values(runner.run(records("x"))) == [3.0]


def test_numbers_of_all_kinds_become_floats(reward_file, records):
    path = reward_file("""
        import fractions
        import numpy as np
        def reward_fn(record):
            return eval(record.completion)
    """)
    texts = ["True", "2", "0.5", "np.float32(1.5)", "np.int64(3)", "np.bool_(True)", "np.array(4.0)"]
    with RewardRunner(path=path, timeout_s=10, workers=1) as runner:
        outcomes = runner.run(records(*texts, "fractions.Fraction(1, 4)"))
    assert _values(outcomes) == [1.0, 2.0, 0.5, 1.5, 3.0, 1.0, 4.0, 0.25]
    assert all(type(outcome.value) is float and outcome.seconds >= 0 for outcome in outcomes)


@pytest.mark.parametrize(
    "text", ["None", "float('nan')", "float('inf')", "'0.5'", "[1.0]", "1j", "10**400", "np.zeros(2)"]
)
def test_anything_but_a_finite_number_is_an_error(reward_file, records, text):
    path = reward_file(f"import numpy as np\ndef reward_fn(record): return {text}")
    with RewardRunner(path=path, timeout_s=10, workers=1, on_error="drop") as runner:
        (outcome,) = runner.run(records("x"))
    assert outcome.value is None
    assert "must be a finite number" in outcome.error


def test_error_names_file_line_cause_record_and_texts(reward_file, records):
    path = reward_file("""
        def helper(text):
            return int(text)

        def reward_fn(record):
            return helper(record.completion)
    """)
    long = "five " * 200
    with RewardRunner(path=path, timeout_s=10, workers=1) as runner, pytest.raises(RewardError) as caught:
        runner.run(records("1", "2", "3", long))
    message = str(caught.value)
    assert "ValueError: invalid literal" in message
    assert f"{path}:3" in message
    assert "prompt_index 1, sample_index 1" in message
    assert "question 1" in message
    assert "five five" in message
    assert len(message) < 2500


def test_dropping_a_record_keeps_the_others(reward_file, records):
    path = reward_file("def reward_fn(record): return int(record.completion)")
    with RewardRunner(path=path, timeout_s=10, workers=2, on_error="drop") as runner:
        outcomes = runner.run(records("1", "x", "3"))
    assert _values(outcomes) == [1.0, None, 3.0]
    assert "ValueError" in outcomes[1].error
    assert f"{path}:1" in outcomes[1].error


@pytest.mark.parametrize("hang", ["time.sleep(60)", "re.match(r'(a+)+$', 'a' * 60 + 'b')"])
def test_hanging_record_is_killed_at_its_deadline_and_only_that_record_fails(reward_file, records, hang):
    path = reward_file(f"""
        import re, time
        def reward_fn(record):
            if record.completion == "hang":
                {hang}
            return 1
    """)
    start = time.monotonic()
    with RewardRunner(path=path, timeout_s=0.5, workers=1, on_error="drop") as runner:
        outcomes = runner.run(records("a", "hang", "b", "hang", "c"))
        assert _values(outcomes) == [1.0, None, 1.0, None, 1.0]
        assert "no result within 0.5 s (--reward-timeout-s, reward.timeout_seconds)" in outcomes[1].error
        assert 0.5 <= outcomes[1].seconds < 3
        assert _values(runner.run(records("a"))) == [1.0], "the runner keeps working"
    assert time.monotonic() - start < 8


def test_deadline_counts_from_the_start_of_each_record(reward_file, records):
    path = reward_file("""
        import time
        def reward_fn(record):
            time.sleep(0.3)
            return 1
    """)
    with RewardRunner(path=path, timeout_s=0.8, workers=1) as runner:
        assert _values(runner.run(records(*"abcdef"))) == [1.0] * 6


@pytest.mark.parametrize(
    ("end", "text"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV")]
)
def test_death_of_a_worker_is_an_error_of_its_record_only(reward_file, records, end, text):
    path = reward_file(f"""
        import os, signal
        def reward_fn(record):
            if record.completion == "die":
                {end}
            return 1
    """)
    with RewardRunner(path=path, timeout_s=10, workers=2, on_error="drop") as runner:
        outcomes = runner.run(records("a", "die", "b", "c", "die", "d"))
    assert _values(outcomes) == [1.0, None, 1.0, 1.0, None, 1.0]
    assert f"its worker process died ({text})" in outcomes[1].error


@pytest.mark.parametrize("timeout_s", [1e9, float("inf")])
def test_deadline_may_be_arbitrarily_long(reward_file, records, timeout_s):
    for source in ("def reward_fn(record): return 1", "async def reward_fn(record): return 1"):
        with RewardRunner(path=reward_file(source), timeout_s=timeout_s, workers=1) as runner:
            assert _values(runner.run(records("x"))) == [1.0]


def test_sys_exit_is_an_error_like_any_other(reward_file, records):
    path = reward_file("import sys\ndef reward_fn(record): sys.exit(1)")
    with RewardRunner(path=path, timeout_s=10, workers=1) as runner, pytest.raises(RewardError, match="SystemExit: 1"):
        runner.run(records("x"))


def test_after_an_error_the_next_batch_is_scored_as_usual(reward_file, records):
    path = reward_file("""
        import time
        def reward_fn(record):
            time.sleep(0.2 if record.completion == "1" else 0)
            return int(record.completion)
    """)
    with RewardRunner(path=path, timeout_s=10, workers=2) as runner:
        with pytest.raises(RewardError):
            runner.run(records("1", "x", "1", "1"))
        assert _values(runner.run(records("4", "5"))) == [4.0, 5.0]


def test_workers_run_in_parallel(reward_file, records):
    path = reward_file("""
        import time
        def reward_fn(record):
            time.sleep(0.25)
            return 1
    """)
    with RewardRunner(path=path, timeout_s=10, workers=4) as runner:
        runner.start()
        start = time.monotonic()
        runner.run(records(*"abcdefgh"))
        assert time.monotonic() - start < 1.5


def test_many_tiny_rewards_take_little_time(reward_file, records):
    path = reward_file("def reward_fn(record): return len(record.completion)")
    with RewardRunner(path=path, timeout_s=10, workers=2) as runner:
        runner.start()
        many = records(*("x" * (index % 7) for index in range(512)))
        seconds = []
        for _ in range(3):
            start = time.monotonic()
            assert _values(runner.run(many)) == [float(index % 7) for index in range(512)]
            seconds.append(time.monotonic() - start)
    assert min(seconds) < 0.5  # about 0.05 s on an idle machine


def test_prints_do_not_disturb_the_protocol(reward_file, records, capfd):
    path = reward_file("""
        import os, sys
        print("hello from import")
        def reward_fn(record):
            print("hello from reward")
            os.write(1, b'["value", 0, 99, 0]')
            sys.stderr.write("x" * 1000)
            return 1
    """)
    with RewardRunner(path=path, timeout_s=10, workers=1) as runner:
        assert _values(runner.run(records("a", "b"))) == [1.0, 1.0]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "hello from import" in shown.err
    assert "hello from reward" in shown.err


def test_workers_run_in_a_main_thread_without_torch_and_survive_ctrl_c(reward_file, records):
    path = reward_file("""
        import os, signal, sys, threading
        def reward_fn(record):
            signal.signal(signal.SIGALRM, lambda *_: None)
            os.kill(os.getpid(), signal.SIGINT)
            assert threading.current_thread() is threading.main_thread()
            return "torch" not in sys.modules
    """)
    with RewardRunner(path=path, timeout_s=10, workers=1) as runner:
        assert _values(runner.run(records("x"))) == [1.0]


def test_module_next_to_the_reward_file_can_be_imported(reward_file, records):
    reward_file("VALUE = 7", name="beside_the_reward.py")
    path = reward_file("import beside_the_reward\ndef reward_fn(record): return beside_the_reward.VALUE")
    with RewardRunner(path=path, timeout_s=10, workers=1) as runner:
        assert _values(runner.run(records("x"))) == [7.0]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        pytest.param(
            "x = 1\nimport no_such_module_here\n", "No module named 'no_such_module_here'", marks=pytest.mark.long
        ),
        pytest.param("x = 1\n1 / 0\n", "ZeroDivisionError", marks=pytest.mark.long),
        ("def reward_fn(record)\n", "line 1"),
        pytest.param("def other(record): return 1\n", "defines no reward_fn", marks=pytest.mark.long),
        ("def reward_fn(): return 1\n", "too many positional arguments"),
        ("import os\nos._exit(4)\n", "exit code 4"),
    ],
)
def test_broken_reward_file_is_reported_at_start_and_at_run(reward_file, records, source, text):
    path = reward_file(source)
    with RewardRunner(path=path, timeout_s=10, workers=2) as runner:
        with pytest.raises(RewardError, match="reward") as caught:
            runner.start()
        assert text in str(caught.value)
        assert path in str(caught.value)
        with pytest.raises(RewardError) as again:
            runner.run(records("x"))
        assert text in str(again.value)


def test_import_error_names_its_line(reward_file):
    path = reward_file("x = 1\n\nimport no_such_module_here\n")
    with RewardRunner(path=path, timeout_s=10, workers=1) as runner, pytest.raises(RewardError) as caught:
        runner.start()
    assert "reward.py line 3: import no_such_module_here" in str(caught.value)


def test_record_that_cannot_be_pickled_is_named(reward_file, records):
    path = reward_file("def reward_fn(record): return 1")
    bad = records("a", "b")
    bad[1].source_record = {"lock": lambda: None}
    with RewardRunner(path=path, timeout_s=10, workers=1, on_error="drop") as runner:
        outcomes = runner.run(bad)
    assert outcomes[0].value == 1.0
    assert "cannot be sent to a worker" in outcomes[1].error


def test_wrong_settings_are_usage_errors(reward_file):
    path = reward_file("def reward_fn(record): return 1")
    for settings in (
        {},
        {"path": path, "reward_fn": len},
        {"path": path, "timeout_s": 0},
        {"path": path, "workers": 0},
        {"path": path, "on_error": "zero"},
    ):
        with pytest.raises(UsageError):
            RewardRunner(**{"timeout_s": 1, **settings})


def test_closed_runner_refuses_work(reward_file, records):
    runner = RewardRunner(path=reward_file("def reward_fn(record): return 1"), timeout_s=10, workers=1)
    runner.close()
    runner.close()
    with pytest.raises(RewardError, match="closed"):
        runner.run(records("x"))


# What a reward function does to the connection, which it identifies among the open sockets of its process.
_RAW = """
    import os, signal, stat, subprocess, sys, time
    def raw(data):
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.write(fd, data)
            except OSError:
                pass
"""


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ("b'garbage'", "sent an invalid message"),
        ("bytes(1000)", "sent an invalid message"),
        # A frame of multiprocessing: length and body.
        ("(23).to_bytes(4) + b'[\"value\", 0, 99.0, 0.1]'", "sent an invalid message"),
    ],
)
def test_bytes_that_are_not_a_report_fail_only_their_record(reward_file, records, sent, text):
    path = reward_file(f"""{_RAW}
    def reward_fn(record):
        if record.completion == "forge":
            raw({sent})
            time.sleep(60)
        return 1
    """)
    start = time.monotonic()
    with RewardRunner(path=path, timeout_s=30, workers=1, on_error="drop") as runner:
        outcomes = runner.run(records("a", "forge", "b"))
    assert _values(outcomes) == [1.0, None, 1.0]
    assert text in outcomes[1].error
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "forged", [["value", 0, 99.0, 0.1], ["value", "x"], ["value", 7, 1.0, 1.0], ["start", 0], 5, {}]
)
def test_reports_that_do_not_match_are_never_taken_as_rewards(reward_file, records, forged):
    """Complete frames with the connection's own key: the worst that code inside the worker could forge."""
    path = reward_file(f"""
        import gc, json, time
        from areno.frames import Frames
        def reward_fn(record):
            if record.completion == "forge":
                frames = next(each for each in gc.get_objects() if isinstance(each, Frames))
                frames.send(json.dumps(["value", 1, 0.5, 0.1]).encode())  # it is running, so this one counts
                frames.send(json.dumps({forged!r}).encode())
                time.sleep(60)
            return 1
    """)
    with RewardRunner(path=path, timeout_s=30, workers=1, on_error="drop") as runner:
        runner.start()
        outcomes = runner.run(records("a", "forge", "b"))
        assert _values(outcomes) == [1.0, 0.5, 1.0]


def test_incomplete_report_is_awaited_only_until_the_deadline(reward_file, records):
    path = reward_file("""
        import gc, os, signal, time
        from areno.frames import Frames
        def reward_fn(record):
            if record.completion == "half":
                frames = next(each for each in gc.get_objects() if isinstance(each, Frames))
                frames._socket.send(frames._form._key + (100).to_bytes(8) + b'["value"')
                os.kill(os.getpid(), signal.SIGSTOP)
            return 1
    """)
    start = time.monotonic()
    with RewardRunner(path=path, timeout_s=1, workers=1, on_error="drop") as runner:
        outcomes = runner.run(records("a", "half", "b"))
    assert _values(outcomes) == [1.0, None, 1.0]
    assert "--reward-timeout-s" in outcomes[1].error
    assert time.monotonic() - start < 15


def test_record_that_kills_its_worker_twice_is_named(reward_file, records):
    path = reward_file("""
        import os, signal
        def reward_fn(record):
            if record.completion == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return 1
    """)
    with RewardRunner(path=path, timeout_s=10, workers=2) as runner, pytest.raises(RewardError) as caught:
        runner.run(records("a", "b", "die", "c"))
    assert "the answer with prompt_index 1, sample_index 0: its worker process died (SIGKILL) (2 times)" in str(
        caught.value
    )


def test_memory_of_a_reward_function_can_be_limited(reward_file, records):
    path = reward_file("""
        def reward_fn(record):
            return len(bytearray(int(record.completion) << 20))
    """)
    with RewardRunner(path=path, timeout_s=30, workers=1, on_error="drop", memory_gb=0.5) as runner:
        outcomes = runner.run(records("1", "600", "2"))
    assert _values(outcomes) == [2.0**20, None, 2.0**21]
    assert "MemoryError" in outcomes[1].error
    assert "--reward-memory-gb" in outcomes[1].error
