"""Session traces: what each session did and how it ended, in the documented fields."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from areno.observability import tracing
from areno.observability.memory_profiler import MemoryProfiler
from areno.observability.session_tracer import SessionTracer
from areno.tools.plot_session_trace import read_sessions, render

FIELDS = {
    *("task_id", "session_id", "rank", "role", "status", "reason", "submit_ts", "finalized_ts", "total_s"),
    *("generate_s", "reward_s", "toolcall_s", "phases", "counters"),
}


@pytest.fixture
def tracer(tmp_path):
    return SessionTracer(tmp_path, "rollout", 2, flush_threshold=3)


def records(tracer):
    return [json.loads(line) for line in tracer.path.read_text().splitlines()] if tracer.path.exists() else []


def session(tracer, task, *phases):
    with tracer.session_context(task) as number:
        for phase in phases:
            with tracer.trace_session_phase(phase):
                tracer.trace_session_event("requests")
    return number


def test_a_session_has_the_documented_fields(tracer, tmp_path):
    task = 0
    session(tracer, task, "generate", "toolcall", "generate", "reward", "wait")
    tracer.finalize(task, "accepted")
    tracer.flush(force=True)
    assert tracer.path == tmp_path / "session_tracer" / "rollout" / "sessions-r2.jsonl"
    (record,) = records(tracer)
    assert set(record) == FIELDS
    assert (record["task_id"], record["status"], record["reason"], record["rank"]) == (task, "accepted", None, 2)
    assert record["counters"] == {"requests": 5}
    assert set(record["phases"]) == {"generate", "toolcall", "reward", "wait"}
    for phase in ("generate", "toolcall", "reward"):
        spans = [span["end_ts"] - span["start_ts"] for span in record["phases"][phase]]
        assert record[f"{phase}_s"] == pytest.approx(sum(spans))
    assert len(record["phases"]["generate"]) == 2
    assert record["total_s"] == pytest.approx(record["finalized_ts"] - record["submit_ts"])
    assert record["submit_ts"] <= record["phases"]["generate"][0]["start_ts"] <= record["finalized_ts"]


def test_sessions_of_concurrent_tasks_do_not_mix_and_include_their_subtasks(tracer):
    async def generate(times):
        with tracer.trace_session_phase("generate"):
            await asyncio.sleep(0)
            tracer.trace_session_event("turns", times)

    async def episode(task, times):
        with tracer.session_context(task):
            await asyncio.gather(*(asyncio.create_task(generate(times)) for _ in range(times)))

    async def several(tasks):
        await asyncio.gather(*(episode(task, times) for task, times in tasks.items()))

    tasks = {0: 1, 1: 2, 2: 3}
    asyncio.run(several(tasks))
    for task in tasks:
        tracer.finalize(task, "accepted")
    assert {record["task_id"]: len(record["phases"]["generate"]) for record in records(tracer)} == tasks
    assert {record["task_id"]: record["counters"]["turns"] for record in records(tracer)} == {
        task: times * times for task, times in tasks.items()
    }


def test_finalizing_a_task_ends_all_its_sessions_and_a_failed_one_stays_failed(tracer):
    task = 0
    whole = session(tracer, task)
    with pytest.raises(ZeroDivisionError), tracer.session_context(task) as broken:
        1 / 0  # noqa: B018
    tracer.finalize(task, "rejected", "all rewards equal")
    tracer.finalize(task, "accepted")  # without effect: it has ended
    tracer.flush(force=True)
    assert {r["session_id"]: (r["status"], r["reason"]) for r in records(tracer)} == {
        whole: ("rejected", "all rewards equal"),
        broken: ("failed", "ZeroDivisionError: division by zero"),
    }


def test_sessions_are_written_when_enough_have_ended_and_the_rest_on_close(tracer):
    tasks = range(5)
    for task in tasks:
        session(tracer, task)
    for task, written in zip(tasks[:4], (0, 0, 3, 3), strict=True):
        tracer.finalize(task, "accepted")
        assert len(records(tracer)) == written
    tracer.flush(force=True)
    assert len(records(tracer)) == 4
    tracer.close()
    assert [record["status"] for record in records(tracer)] == ["accepted"] * 4 + ["pending"]
    assert records(tracer)[-1]["total_s"] is None


def test_a_disabled_tracer_and_code_outside_sessions_record_nothing(tmp_path):
    off, on = SessionTracer(tmp_path, enabled=False), SessionTracer(tmp_path)
    task = 0
    session(off, task, "generate")
    off.finalize(task, "accepted")
    off.close()
    with on.trace_session_phase("generate"):
        on.trace_session_event("x")
    on.close()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_status_is_refused(tracer):
    with pytest.raises(ValueError, match="pending, accepted, rejected, failed, dropped"):
        tracer.finalize(0, "done")


def test_the_plot_has_a_bar_for_each_phase_and_the_numbers(tmp_path):
    @tracing.trace_session("generate")
    async def generate():
        await asyncio.sleep(0.001)

    @tracing.trace_session("reward")
    def reward():
        tracing.trace_session_event("scored")

    async def episode(task):
        with tracing.session_context(task):
            async with tracing.atrace_session_phase("toolcall"):
                await generate()
            with tracing.trace_session_phase("mine"):
                reward()

    tracing.configure(tmp_path, "rollout", session={"enabled": True, "flush_threshold": 1})
    tracer = tracing.session_tracer()
    try:
        for status in ("accepted", "rejected"):
            task = 0
            asyncio.run(episode(task))
            tracer.finalize(task, status, "<b>why</b>" if status == "rejected" else None)
    finally:
        tracing.configure(tmp_path, "rollout")
    with open(tracer.path, "a") as file:
        file.write('{"submit_ts": 1}\n')  # of another program
        file.write(json.dumps(records(tracer)[0] | {"submit_ts": "noon"}) + "\n")
        file.write(json.dumps(records(tracer)[0] | {"total_s": "1"}) + "\n")
        file.write("[" * 100_000 + "\n")  # nested too deeply
        file.write('{"submit_ts": 1')  # a truncated line
    command = [sys.executable, "-m", "areno.tools.plot_session_trace", str(tmp_path), str(tmp_path / "out.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"2 sessions in {tmp_path / 'out.html'}, 5 malformed lines skipped\n")
    page = (tmp_path / "out.html").read_text()
    assert "2 sessions: 1 accepted, 1 rejected" in page
    assert len(re.findall("<rect ", page)) == 2 * (1 + 4)
    assert "&lt;b&gt;why" in page
    assert "<b>why" not in page
    sessions, _ = read_sessions([tracer.path])
    longest = max(record["generate_s"] for record in sessions)
    assert f"<td>{longest:.3f}</td></tr>" in page
    assert render(sessions).count("<svg") == 1


def test_memory_snapshots_need_a_gpu(tmp_path):
    from areno.errors import UsageError

    with MemoryProfiler(tmp_path, [], gpu=False).step(0, refuse_calls):
        pass
    with pytest.raises(UsageError, match=r"memory_profiler\.profile_steps=\[1\] requires a CUDA device.*remove"):
        MemoryProfiler(tmp_path, [1], gpu=False)
    assert list(tmp_path.iterdir()) == []


def refuse_calls(function, *arguments):
    raise AssertionError(f"{function} was called in a step that is not profiled")


def test_each_rank_writes_its_memory_of_a_profiled_step_even_if_the_step_fails(tmp_path, monkeypatch):
    """On a CPU, where PyTorch records no memory, two ranks with PyTorch's calls replaced; on a GPU, one rank."""
    import torch
    from torch.cuda import memory

    numbers, calls = [0] if torch.cuda.is_available() else [0, 1], []
    ranks = [SimpleNamespace(config=SimpleNamespace(peers=SimpleNamespace(rank=number))) for number in numbers]

    def on_all_ranks(function, *arguments):
        return [function(rank, *arguments) for rank in ranks]

    if len(ranks) == 2:
        monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(options))
        monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"memory"))
    profiler = MemoryProfiler(tmp_path, [1, 3], max_entries=7)
    for step in range(3):
        with profiler.step(step, on_all_ranks):
            pass
    with pytest.raises(ZeroDivisionError), profiler.step(3, on_all_ranks):
        raise ZeroDivisionError
    folder = tmp_path / "memory_snapshots"
    written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.pickle"))
    assert written == [f"step_{step}/r{number}.pickle" for step in (1, 3) for number in numbers]
    assert all(path.stat().st_size > 0 for path in folder.rglob("*.pickle"))
    once = [{"max_entries": 7}] * 2 + [{"enabled": None}] * 2
    assert calls == (once * 2 if len(ranks) == 2 else [])
