"""``areno inspect`` shows what a model wrote and lets none of it steer the terminal."""

from __future__ import annotations

from areno.cli.main import main
from areno.storage.run_dir import RunDirectory

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31mred\r\u202e"


def test_escape_sequences_are_shown_and_not_sent(tmp_path, capsys):
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


def test_samples_of_one_step_are_listed_the_first_step_included(tmp_path, capsys):
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
    for given, listed in (
        ([], ["0/0/0", "0/0/0", "1/0/0"]),
        (["--step", "0"], ["0/0/0", "0/0/0"]),
        (["--step", "1"], ["1/0/0"]),
    ):
        assert main(["inspect", str(run.path), *given]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == listed
