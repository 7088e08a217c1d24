"""Perf traces: events follow the Chrome trace event format, nest on their tracks, and are merged into one file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from areno.errors import UsageError
from areno.observability import tracing
from areno.observability.perf_tracer import PerfTracer
from areno.tools.perf_trace_converter import convert

CATEGORIES = {"compute", "comm", "io", "sync", "scheduler", "instr", "misc"}


@pytest.fixture
def tracer(tmp_path):
    return PerfTracer(tmp_path, "trainer", 3)


def events_of(tracer):
    tracer.save(force=True)
    return [json.loads(line) for line in tracer.path.read_text().splitlines()]


def spans(events):
    return {event["name"]: event for event in events if event["ph"] == "X"}


def check_format(trace):
    """Asserts the rules of the Chrome trace event format for the kinds of events used, and that scopes of a track nest."""
    assert isinstance(trace["traceEvents"], list)
    tracks = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float)
        assert event["ph"] in ("X", "i", "M")
        if event["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}[event["name"]]
            assert set(event["args"]) == {key}
            continue
        assert isinstance(event["cat"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "i":
            assert event["s"] in ("t", "p", "g")
        else:
            assert event["dur"] >= 1
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for own in tracks.values():
        open_ends = []
        for start, end in sorted(own, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1.5:  # the minimum duration of 1 us may overlap the next start
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1.5, "two events of a track overlap"
            open_ends.append(end)


def test_scopes_instants_and_decorators_become_documented_events(tracer, tmp_path):
    @tracer.trace_scope("train", "compute")
    def train():
        time.sleep(0.002)
        return 5

    before = time.time() * 1e6
    with tracer.step(7), tracer.trace_scope("step", "scheduler", {"rows": 8}):
        assert train() == 5
        tracer.instant("weights updated", "sync")
    assert tracer.path == tmp_path / "perf_tracer" / "trainer" / "traces-r3.jsonl"
    events = events_of(tracer)
    check_format({"traceEvents": events})
    scopes = spans(events)
    assert scopes["step"]["args"] == {"rank": 3, "role": "trainer", "global_step": 7, "rows": 8}
    assert scopes["step"]["ts"] <= scopes["train"]["ts"]
    assert scopes["step"]["dur"] >= scopes["train"]["dur"] >= 2000
    assert scopes["step"]["tid"] == threading.get_native_id()
    assert before <= scopes["step"]["ts"] <= time.time() * 1e6
    assert {event["cat"] for event in events if event["ph"] != "M"} == {"scheduler", "compute", "sync"} < CATEGORIES
    (moment,) = [event for event in events if event["ph"] == "i"]
    assert (moment["name"], moment["s"]) == ("weights updated", "t")


def test_a_scope_that_raises_is_recorded_too(tracer):
    with pytest.raises(KeyError), tracer.trace_scope("fails"):
        raise KeyError
    assert "fails" in spans(events_of(tracer))


def test_scopes_of_asyncio_tasks_overlap_in_time_but_not_on_a_track(tracer):
    @tracer.atrace_scope("inner")
    async def inner():
        await asyncio.sleep(0.002)

    async def episode(number):
        await asyncio.sleep(0.001 * (number % 3))
        async with tracer.atrace_scope(f"episode {number}"):
            await inner()
            with tracer.trace_scope(f"sync {number}"):
                pass
            await asyncio.gather(inner(), inner())  # tasks started inside a scope
            await asyncio.sleep(0.001 * number)

    async def several():
        await asyncio.gather(*(episode(number) for number in range(6)))
        await episode(100)

    asyncio.run(several())
    events = events_of(tracer)
    check_format({"traceEvents": events})
    scopes = spans(events)
    assert scopes["sync 4"]["tid"] == scopes["episode 4"]["tid"]
    assert len({scopes[f"episode {number}"]["tid"] for number in range(6)}) == 6
    tracks = {event["tid"] for event in events if event["ph"] == "X"}
    assert scopes["episode 100"]["tid"] in {e["tid"] for e in events if e["name"] != "episode 100"}  # tracks are reused
    assert len(tracks) <= 18


def test_threads_have_tracks_of_their_own(tracer):
    def work():
        with tracer.trace_scope("elsewhere"):
            pass

    thread = threading.Thread(target=work, name="areno-rollout")
    with tracer.trace_scope("here"):
        thread.start()
        thread.join()
    events = events_of(tracer)
    scopes = spans(events)
    assert scopes["here"]["tid"] != scopes["elsewhere"]["tid"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named[scopes["elsewhere"]["tid"]] == "areno-rollout"


def test_events_are_written_each_save_interval_or_when_forced(tmp_path):
    tracer = PerfTracer(tmp_path, save_interval=3)

    def written():
        return set(spans(map(json.loads, tracer.path.read_text().splitlines()))) if tracer.path.exists() else set()

    for step in range(5):
        with tracer.step(step), tracer.trace_scope(f"step {step}"):
            pass
        tracer.save(step)
        assert written() == ({f"step {n}" for n in range(3)} if step >= 2 else set())
    tracer.save(4, force=True)
    assert written() == {f"step {n}" for n in range(5)}


def test_a_disabled_tracer_writes_nothing(tmp_path):
    tracer = PerfTracer(tmp_path, enabled=False, profile_steps=[0])

    async def work():
        async with tracer.atrace_scope("a"):
            tracer.instant("b")

    with tracer.step(0), tracer.trace_scope("c"):
        asyncio.run(work())
    tracer.save(force=True)
    assert list(tmp_path.iterdir()) == []


def test_the_torch_profile_of_a_chosen_step_lies_inside_it_on_separate_tracks(tmp_path):
    import torch

    tracer = PerfTracer(tmp_path, profile_steps=[1])
    for step in range(3):
        with tracer.step(step), tracer.trace_scope(f"step {step}", "compute"):
            torch.ones(200, 200) @ torch.ones(200, 200)
    events = events_of(tracer)
    check_format({"traceEvents": events})
    profiled = [event for event in events if event["ph"] == "X" and event["tid"] < 0]
    assert any(event["name"] == "aten::mm" for event in profiled)
    around = spans(events)["step 1"]
    for event in profiled:
        if event["name"].startswith("aten::"):
            assert around["ts"] - 2000 <= event["ts"] <= around["ts"] + around["dur"] + 2000
            assert event["args"]["global_step"] == 1
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert all(names[event["tid"]].startswith("torch profiler") for event in profiled)


CHILD = """
import sys, time
from areno.observability import tracing
tracing.configure(sys.argv[1], sys.argv[2], int(sys.argv[3]), perf={"enabled": True})
@tracing.trace_perf("generate", "compute")
def generate():
    time.sleep(0.001)
for step in range(10 ** 6 if sys.argv[4:] else 2):
    with tracing.perf_tracer().step(step), tracing.trace_scope("step"):
        generate()
    tracing.save(step)
    print(step, flush=True)
"""


def test_traces_of_several_processes_merge_into_one_valid_trace(tmp_path):
    for role, rank in (("trainer", 0), ("rollout", 0), ("rollout", 1)):
        subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), role, str(rank)], check=True, timeout=60)
    command = [sys.executable, "-m", "areno.tools.perf_trace_converter", str(tmp_path), str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "out.json").read_text())
    check_format(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rollout 0", "rollout 1", "trainer 0"]
    assert sum(event["name"] == "generate" for event in trace["traceEvents"]) == 6


def test_a_killed_process_leaves_a_trace_that_converts(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), "trainer", "0", "on"], stdout=subprocess.PIPE)
    for _ in range(5):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    path = tmp_path / "perf_tracer" / "trainer" / "traces-r0.jsonl"
    whole = len(path.read_text().splitlines())
    with open(path, "a") as file:
        file.write("[" * 100_000 + "\n")  # nested too deeply
        file.write('{"name": "foreign", "ph": "X", "ts": "noon"}\n{"name": "foreign", "ph": "X", "ts": 1, "pid": []}\n')
        file.write('{"name": "torn", "ph": "X", "ts"')
    assert convert([path], tmp_path / "out.json") == (whole, 4)
    check_format(json.loads((tmp_path / "out.json").read_text()))


def test_processes_with_the_same_pid_on_two_machines_stay_apart(tmp_path):
    for rank in range(2):
        tracer = PerfTracer(tmp_path, rank=rank)  # both have the pid of this process
        with tracer.trace_scope("x"):
            pass
        tracer.save(force=True)
    convert([tmp_path], tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in events if event["name"] == "x"}) == 2


def test_bad_paths_and_arguments_are_reported(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere: found no traces-r"):
        convert([tmp_path / "nowhere"], tmp_path / "out.json")
    PerfTracer(tmp_path).save(force=True)
    with pytest.raises(UsageError, match=r"cannot be written.*another output"):
        convert([tmp_path], tmp_path / "no" / "out.json")
    done = subprocess.run([sys.executable, "-m", "areno.tools.perf_trace_converter"], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"usage:" in done.stderr


def test_code_decorated_before_configure_is_traced_after_it(tmp_path):
    @tracing.trace_perf()
    def early():
        return os.getpid()

    early()
    tracing.configure(tmp_path, "trainer", perf={"enabled": True, "save_interval": 1, "profile_steps": None})
    try:
        early()
        tracing.save(0)
        events = events_of(tracing.perf_tracer())
    finally:
        tracing.configure(tmp_path, "trainer")
    assert [name.rpartition(".")[2] for name in spans(events)] == ["early"]
