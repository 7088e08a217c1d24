"""The repair tasks: each is broken as its row says, the correct module solves it, and cheating is not rewarded."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial

import pytest

from areno.api.agentic.demonstrations import calls, says
from tests.examples import scripted

FOLDER = scripted.FOLDER / "coding"
sys.path.insert(0, str(FOLDER))

import sandbox  # noqa: E402
from bugs import BUGS  # noqa: E402
from coding import Repair  # noqa: E402
from sandbox import NoSandboxError, working_method  # noqa: E402

ROWS = [json.loads(line) for line in (FOLDER / "dataset.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(autouse=True)
def _sandbox():
    try:
        working_method()
    except NoSandboxError as error:
        pytest.skip(str(error))


def write(path, content):
    return calls(("write_file", {"path": path, "content": content}))


def reward(row, *answers):
    return scripted.replayed(scripted.reward("coding"), row, answers)


def test_the_file_equals_the_generators_output(tmp_path):
    generator = scripted.module(FOLDER / "dataset_generator.py")
    assert [generator.make_record(bug) for bug in BUGS] == ROWS


def test_rows_are_complete():
    assert 10 <= len(ROWS) <= 20
    assert len({row["instance_id"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row["FAIL_TO_PASS"], row["instance_id"]
        assert row["PASS_TO_PASS"], row["instance_id"]
        assert row["difficulty"] in ("easy", "medium", "hard")


def test_the_correct_module_solves_every_task_and_the_faulty_one_none():
    async def passing(bug, row, content):
        task = Repair()
        task.reset(row)
        task.write_file(f"{bug.name}.py", content)
        return await task.passing_tests(), await task.reward()

    async def everything():
        pairs = list(zip(BUGS, ROWS, strict=True))
        right = await asyncio.gather(*(passing(bug, row, bug.right) for bug, row in pairs))
        wrong = await asyncio.gather(*(passing(bug, row, bug.wrong) for bug, row in pairs))
        return right, wrong

    right, wrong = asyncio.run(everything())
    for row, (passed, value) in zip(ROWS, right, strict=True):
        assert (passed, value) == ({*row["FAIL_TO_PASS"], *row["PASS_TO_PASS"]}, 1.0), row["instance_id"]
    for row, (passed, value) in zip(ROWS, wrong, strict=True):
        assert (passed, value) == (set(row["PASS_TO_PASS"]), -0.5), row["instance_id"]


ROMAN = next(row for row in ROWS if row["instance_id"] == "areno__roman")
RIGHT = next(bug.right for bug in BUGS if bug.name == "roman")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (RIGHT, 1.0),
        (
            RIGHT.replace("(900, 'CM'), ", "").replace("(90, 'XC'),", "").replace("(9, 'IX'), ", ""),
            0.5,
        ),  # nines still fail
        ("def to_roman(n):\n    return 'I'\n", -1.0),  # breaks passing tests
        ("def to_roman(n:\n", -1.0),  # syntax error
        ("while True: pass\n", -1.0),
        ("import os\nos._exit(0)\n", -1.0),
        ("import sys\nprint('OK')\nsys.exit(0)\n", -1.0),
        ('print(\'["test_sums", "test_fours", "test_nines"]\')\nimport os\nos._exit(0)\n', -1.0),
    ],
    ids=["right", "half", "worse", "syntax", "loop", "exit", "sys-exit", "forged"],
)
def test_a_module_is_rewarded_for_its_passing_tests(content, expected, monkeypatch):
    monkeypatch.setattr(sandbox, "Limits", partial(sandbox.Limits, seconds=3))  # shorter, for the endless loop
    assert reward(ROMAN, write("roman.py", content)) == expected


def test_tests_cannot_be_changed():
    easy = "import unittest\nclass Test(unittest.TestCase):\n    def test_sums(self): pass\n"
    assert reward(ROMAN, write("test_roman.py", easy)) == -1.0  # nothing was written
    assert reward(ROMAN, write("roman.py", RIGHT), write("test_roman.py", "")) == 1.0


def call(row, name, **arguments):
    async def run():
        task = Repair()
        task.reset(row)
        return await {tool.__name__: tool for tool in task.tools()}[name](**arguments)

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["../x.py", "/etc/x", "a/../../x", "", ".hidden", "a//../..", "roman.py/x"])
def test_paths_stay_in_the_folder(path):
    outcome = reward(ROMAN, calls(("write_file", {"path": path, "content": "x"})))
    assert outcome == -1.0


def test_the_model_sees_why_a_test_fails():
    shown = call(ROMAN, "run_tests")
    assert "AssertionError" in shown
    assert "FAILED (failures=2)" in shown
    assert "test_sums" not in shown.split("FAILED")[1], "the model must not see the list of passed tests"


def test_a_conversation_ends_with_a_text_answer_or_at_its_turn_limit():
    task = Repair()
    task.reset({**ROMAN, "max_turns": 3})
    from areno.api.agentic.environment import replay

    asyncio.run(replay(task, {**ROMAN, "max_turns": 3}, [calls(("read_file", {"path": "roman.py"}))] * 9))
    assert task.turns == 3
    asyncio.run(replay(task, ROMAN, [says("done"), write("roman.py", RIGHT)]))
    assert (task.turns, task.written) == (1, set())


def test_without_a_sandbox_the_example_refuses_to_run(tmp_path):
    # Copies of the programs that know no method.
    import subprocess

    for name in ("bugs", "coding", "confine", "run_agent", "reward"):
        (tmp_path / f"{name}.py").write_text((FOLDER / f"{name}.py").read_text())
    source = (FOLDER / "sandbox.py").read_text()
    (tmp_path / "sandbox.py").write_text(
        source.replace('METHODS = ("bubblewrap", "namespaces", "landlock")', "METHODS = ()")
    )
    for name in ("run_agent", "reward"):
        done = subprocess.run([sys.executable, tmp_path / f"{name}.py"], capture_output=True, text=True, timeout=120)
        assert done.returncode != 0
        assert "no sandbox works on this machine, so no command is run" in done.stderr
