"""``areno inspect`` shows what a model wrote, without letting it control the terminal."""

from __future__ import annotations

import json

import pytest

from areno.cli.main import main
from areno.storage.run_dir import RunDirectory
from tests.reports.written_runs import write_run

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31mred\r\u202e"


def test_escape_sequences_are_shown_escaped(tmp_path, capsys):
    run = RunDirectory(tmp_path / "run").create()
    run.write_config("algo: gspo\n")
    sample = {"step": 0, "prompt_index": 0, "sample_index": 0, "reward": 1.0, "advantage": 0.5, "response_len": 3}
    run.append_samples([{**sample, "finish_reason": EVIL, "prompt": "2+2?", "completion": f"四 {EVIL}"}])
    for more in ([], ["--sample", "0/0/0"]):
        assert main(["inspect", str(run.path), *more]) == 0
        shown = capsys.readouterr().out
        assert all(c.isprintable() or c == "\n" for c in shown)
        assert "\\x1b[2J" in shown
        assert "四" in shown


def test_the_parts_of_a_reward_are_shown(tmp_path, capsys):
    run = RunDirectory(tmp_path / "run").create()
    run.write_config("algo: gspo\n")
    sample = {"step": 0, "prompt_index": 0, "sample_index": 0, "reward": 1.1, "advantage": 0.5, "response_len": 3}
    parts = {"reward_parts": {"format": 0.5, "answer": 1.0}, "finish_reason": "stop", "prompt": "2+2?"}
    run.append_samples([{**sample, **parts, "completion": "4"}])
    assert main(["inspect", str(run.path)]) == 0
    assert "1.100      0.500       3     -  [format 0.5, answer 1] 4" in capsys.readouterr().out
    assert main(["inspect", str(run.path), "--sample", "0/0/0"]) == 0
    assert "reward 1.1 [format 0.5, answer 1]  finish stop" in capsys.readouterr().out


def test_samples_of_any_step_are_listed_including_step_0(tmp_path, capsys):
    run = RunDirectory(tmp_path / "run").create()
    run.write_config("algo: gspo\n")
    sample = {
        "prompt_index": 0,
        "sample_index": 0,
        "reward": 1.0,
        "advantage": None,
        "response_len": 3,
        "completion": "4",
    }
    run.append_samples([{"step": step, **sample} for step in (0, 0, 1)])
    for options, listed in (
        ([], ["0/0/0", "0/0/0", "1/0/0"]),
        (["--step", "0"], ["0/0/0", "0/0/0"]),
        (["--step", "1"], ["1/0/0"]),
    ):
        assert main(["inspect", str(run.path), *options]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == listed


def test_the_newest_samples_are_listed_with_a_note_about_the_rest(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=40)
    assert main(["inspect", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[1:-1]]
    records = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    expected = [f"{record['step']}/{record['prompt_index']}/{record['sample_index']}" for record in records]
    assert names == expected[-100:]
    assert lines[-1] == "the newest 100 of 160 samples; --limit lists more, and --step lists the samples of one step"
    assert main(["inspect", str(run), "--limit", "160"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 161


def test_runs_of_experiments_and_samples_without_an_index_are_shown(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("experiment_name: e\n")
    (run / "samples.index").unlink()
    assert main(["inspect", str(run), "--sample", "3/1/0"]) == 0
    shown = capsys.readouterr().out
    tokens = [line.split()[4] for line in shown.splitlines() if line.split()[3:4] == ["*"]]
    assert tokens == ["103", "104", "105", "106"]


def test_a_nan_reward_is_shown(tmp_path, capsys):
    run = write_run(tmp_path / "run", samples=lambda record: {**record, "reward": float("nan")})
    assert main(["inspect", str(run)]) == 0
    assert main(["inspect", str(run), "--sample", "0/0/0"]) == 0
    assert "reward nan" in capsys.readouterr().out


def test_log_probs_and_advantages_that_are_not_finite_are_shown(tmp_path, capsys):
    def diverged(record):
        *context, sampled = record["rows"][0]
        numbers = {"logprobs": [float("nan"), float("-inf"), -2.0, -2.5], "advantages": [float("nan")] * 4}
        return {**record, "rows": [[*context, {**sampled, **numbers}]], "reward_parts": {"exact": float("inf")}}

    run = write_run(tmp_path / "run", samples=diverged)
    assert main(["inspect", str(run)]) == 0
    assert main(["inspect", str(run), "--sample", "0/0/0"]) == 0
    shown = capsys.readouterr().out
    assert "[exact inf]" in shown
    numbers = [line.split()[5:7] for line in shown.splitlines() if line.split()[3:4] == ["*"]]
    assert numbers == [["nan", "nan"], ["-inf", "nan"], ["-2.0000", "nan"], ["-2.5000", "nan"]]


def test_a_step_without_samples_is_an_error_that_names_the_steps(tmp_path, capsys):
    assert main(["inspect", str(write_run(tmp_path / "run")), "--step", "9"]) == 2
    assert "has no samples of this step; it has samples of steps 0 to 3" in capsys.readouterr().err


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "2+2?\nQuickly."}]},
    {"role": "assistant", "content": None, "reasoning_content": "Sum it.", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "4"},
    {"role": "assistant", "content": "x" * 3000},
]


def test_a_conversation_is_shown_as_turns_with_its_tools(tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=1, samples=lambda record: {**record, "messages": TALK})
    assert main(["inspect", str(run), "--sample", "0/0/1"]) == 0
    shown = capsys.readouterr().out
    assert (
        """
conversation of 5 messages
  system     Be brief.
  user       2+2?
             Quickly.
  assistant  Sum it.
             calls add({"a": 2})
  tool       add returns
             4
  assistant  xxx"""
        in shown
    )
    assert "characters omitted" in shown
    assert "row 1 of 1: 7 tokens, 4 trained on" in shown
    assert main(["inspect", str(run), "--sample", "0/0/1", "--all"]) == 0
    assert "x" * 3000 in capsys.readouterr().out


@pytest.mark.parametrize("name", ["9/0/0", "0/0", "a/b/c", "0/0/-1"])
def test_the_error_about_a_missing_sample_names_the_existing_ones(name, tmp_path, capsys):
    assert main(["inspect", str(write_run(tmp_path / "run")), "--sample", name]) == 2
    error = capsys.readouterr().err
    assert f"--sample {name}: this sample is not recorded; " in error
    assert "to list the recorded samples (0/0/0 to 3/1/1)" in error


def test_only_the_samples_that_are_shown_are_read(tmp_path, capsys):
    """Lines of other samples are not JSON, so that a reader of the whole file would have to skip them."""
    run = write_run(tmp_path / "run", steps=50)
    path = run / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"#" * len(line) for line in lines[:100]) + b"".join(lines[100:]))
    assert main(["inspect", str(run), "--limit", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "48/1/1"
    assert main(["inspect", str(run), "--step", "30"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
