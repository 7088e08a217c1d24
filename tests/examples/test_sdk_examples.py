"""The SDK programs: those in examples/sdk, and those in the documentation if it is available."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest

from tests.support.cli import python

EXAMPLES = Path(__file__).parents[2] / "examples" / "sdk"
PAGE = Path(os.environ.get("ARENO_TEST_SPEC", EXAMPLES.parents[2] / "shared" / "spec")) / "trainer-sdk.md"


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"question": "What is 3 plus 4?", "answer": "3 + 4 = 7\n#### 7"}, {"question": "q", "answer": "#### 1"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(program, *arguments, cwd, **how):
    done = python(program, *arguments, folder=cwd, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rollout_example_prints_an_answer_and_how_it_ended(tiny_checkpoint, tmp_path):
    out = run(
        EXAMPLES / "rollout.py", "--model", tiny_checkpoint, cwd=tmp_path, fresh=True
    )  # in a fresh process, to show that it imports all it needs
    assert re.search(r"\((\d+) tokens, ended by (stop|length)\)", out)


def test_the_gspo_example_makes_one_update(tiny_checkpoint, problems, tmp_path):
    out = run(EXAMPLES / "gspo_step.py", "--model", tiny_checkpoint, "--data", problems, cwd=tmp_path)
    check_statistics(out)


def check_statistics(out):
    stats = ast.literal_eval(out.strip().splitlines()[-1])
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["step_train_time_s"] > 0
    assert stats["lr"] == 1e-4
    assert "loss" in stats
    assert "grad_norm" in stats


def printed_programs():
    """The complete programs of the page: from their imports to ``asyncio.run(main())``."""
    if not PAGE.is_file():
        pytest.skip(f"the documentation is missing ({PAGE}); set ARENO_TEST_SPEC")
    programs = re.findall(r"^import asyncio\n.*?^asyncio\.run\(main\(\)\)$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    return programs


def test_the_first_printed_program_runs(tiny_checkpoint, tmp_path):
    program = printed_programs()[0].replace("Qwen/Qwen3.5-4B", str(tiny_checkpoint))
    (tmp_path / "program.py").write_text(program + '\nprint("done")\n')
    assert run(tmp_path / "program.py", cwd=tmp_path) == "done\n"


def test_the_second_printed_program_runs_without_its_stray_parenthesis(tiny_checkpoint, problems, tmp_path):
    program = printed_programs()[1].replace("Qwen/Qwen3.5-4B", str(tiny_checkpoint))
    hub = 'load_dataset("gsm8k", "main", split="train[0:1]")'
    stray = "        )\n    )\n\n    stats"
    assert program.count(hub) == program.count(stray) == 1
    program = program.replace(hub, f'load_dataset("json", data_files={str(problems)!r}, split="train[0:1]")')
    (tmp_path / "program.py").write_text(program.replace(stray, "        )\n\n    stats"))
    check_statistics(run(tmp_path / "program.py", cwd=tmp_path))
