"""Real runs write a report when they finish, fail or are stopped; for killed runs ``areno report`` writes it."""

from __future__ import annotations

import json
import re
import signal

import pytest

from areno.cli.main import main
from areno.reports import report
from areno.reports.run_data import RunData
from tests.experiments.runs import Run, make_task, settings
from tests.reports.charts import elements, points, scale
from tests.reports.prepared import Page
from tests.support.cli import kill, start, task_arguments, wait_for_text, write_task

ID = ("step", "prompt_index", "sample_index")


def page_of(run):
    return Page((run / "report.html").read_text()).root


def run_command(*command):
    return main([*map(str, command)])


def test_a_finished_run_has_a_report_with_its_numbers(tiny_checkpoint, tmp_path):
    run = tmp_path / "run"
    task = write_task(tmp_path / "task", rows=24)
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(
        "\n".join(json.dumps({"prompt": f"What is {a} plus 5?", "solutions": ["5"]}) for a in range(40, 44))
    )
    evaluation = ["--eval-dataset-path", held_out, "--eval-interval", 2, "--save-interval", 2, "--epochs", 1]
    assert run_command(*task_arguments("grpo", tiny_checkpoint, task, run), *evaluation) == 0
    page, source = page_of(run), (run / "report.html").read_text()
    assert page.one("span", class_="state").text == "finished"
    assert "The run finished: 4 steps, 1 epoch" in page.one("", id="ended").text
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["rollout/rewards_mean"] for record in records if "rollout/rewards_mean" in record]
    chart = re.search(r"<code>rollout/rewards_mean</code></figcaption>\s*(<svg.*?</svg>)", source, re.DOTALL)[1]
    _, y_of = scale(chart)
    (line,) = elements(chart, "path", "s0")
    assert [y_of(y) for _, y in points(line.get("d"))] == pytest.approx(rewards, abs=0.01)
    compared = page.one("section", **{"aria-labelledby": "compared"})
    assert len(compared.all("article")) == 4
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    best = max(record["reward"] for record in samples)
    first = page.one("section", **{"aria-labelledby": "samples"}).text.split("Best", 1)[1]
    assert f"Reward {best:.3g}" in first
    header, section = page.one("header").text, page.one("section", **{"aria-labelledby": "samples"})
    assert "24 training examples with 24 distinct prompts, 100% of the examples seen in 4 steps" in header
    assert "4 held-out examples with 4 distinct prompts." in header
    assert "Checkpoints exist for steps 2, 4." in header
    prompts = {"-".join(str(record[key]) for key in ID): record["prompt"] for record in samples}
    for box in section.all("article"):
        terms = map(int, re.findall("[0-9]+", prompts[box.attributes["id"].removeprefix("sample-")]))
        assert f"solutions: ['{sum(terms)}']" in box.text
    assert re.search(r"used at most \d\.\d GiB of \d+\.\d GiB", page.one("section", **{"aria-labelledby": "time"}).text)
    log = (run / "log.txt").read_text().splitlines()
    assert log[-1].endswith(f"report: {run / 'report.html'}")


def test_a_failed_run_has_a_report_with_its_error(tiny_checkpoint, tmp_path):
    run = tmp_path / "run"
    task = write_task(tmp_path / "task", rows=12)
    task["reward.py"].write_text("def reward_fn(record):\n    return record.completion / 2\n")
    assert run_command(*task_arguments("grpo", tiny_checkpoint, task, run)) == 1
    ended = page_of(run).one("", id="ended").text
    assert "failed before the end of its first step: RewardError" in ended
    assert "unsupported operand" in ended


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_has_a_report_and_a_killed_one_gets_one_from_the_command(signum, tiny_checkpoint, tmp_path):
    run = tmp_path / "run"
    task = write_task(tmp_path / "task")
    process = start(*task_arguments("grpo", tiny_checkpoint, task, run), "--epochs", 1000)
    wait_for_text(process, "step 3/")
    kill(process, signum)
    if signum == signal.SIGTERM:
        text = "stopped by SIGTERM"
    else:
        assert not (run / "report.html").exists()
        assert run_command("report", run) == 0
        text = "was killed"
    ended = page_of(run).one("", id="ended").text
    assert text in ended
    assert "of 10,000" in ended
    # A stopped run saves its last step; a killed one cannot.
    again = f"areno train --resume {run}" if signum == signal.SIGTERM else "The run has no checkpoint to resume from"
    assert again in ended


def test_a_run_in_progress_has_a_report_after_a_checkpoint(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "REFRESH_S", 0.0)
    monkeypatch.setattr(report, "REFRESH_SHARE", 1e9)
    run = tmp_path / "run"
    task = write_task(tmp_path / "task", rows=24)
    task["reward.py"].write_text(
        "from pathlib import Path\n\n\ndef reward_fn(record):\n"
        f"    page = Path({str(run / 'report.html')!r})\n"
        "    if page.exists():\n"
        f"        Path({str(tmp_path / 'seen.html')!r}).write_text(page.read_text())\n"
        "    return float(len(record.completion))\n"
    )
    assert run_command(*task_arguments("grpo", tiny_checkpoint, task, run), "--save-interval", 1, "--epochs", 1) == 0
    seen = Page((tmp_path / "seen.html").read_text()).root
    assert seen.one("span", class_="state").text == "running"
    assert re.search("The run is still running, after [123] steps? of 4", seen.one("", id="ended").text)


def test_a_report_that_cannot_be_written_does_not_fail_a_run(tiny_checkpoint, tmp_path):
    run = tmp_path / "run"
    (run / "report.html").mkdir(parents=True)
    assert (
        run_command(*task_arguments("grpo", tiny_checkpoint, write_task(tmp_path / "task", rows=6), run), "--epochs", 1)
        == 0
    )
    assert "WARNING areno.reports.report: the report was not written" in (run / "log.txt").read_text()
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_an_experiment_ends_with_a_report(tmp_path):
    changes = {"total_train_steps": 3, "recover__mode": "disabled"}
    run = Run(
        tmp_path / "run", settings(make_task(tmp_path / "task"), tmp_path / "files", **changes), forked=True
    ).finish()
    page = page_of(run.logs)
    assert page.one("span", class_="state").text == "finished"
    assert "all 3 steps of total_train_steps=3 are done" in page.one("", id="ended").text
    assert "rollout/reward/avg" in [code.text for code in page.all("code")]
    assert RunData(run.logs).is_experiment
    assert "report: " in run.log.splitlines()[-1]
