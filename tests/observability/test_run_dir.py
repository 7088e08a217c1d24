"""The run directory: valid lines, atomic files, and clean truncation after a kill."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from areno.errors import ArenoError, UsageError
from areno.storage.run_dir import RunDirectory


@pytest.fixture
def run_dir(tmp_path):
    return RunDirectory(tmp_path / "runs" / "one").create()


def test_create_makes_the_documented_layout_and_may_be_repeated(run_dir):
    run_dir.create()
    assert run_dir.events_path.is_dir()
    assert run_dir.checkpoints_path.is_dir()
    run_dir.write_config("algo: gspo\n")
    run_dir.append_metrics(0, {"train/loss": 1.0})
    run_dir.append_samples([{"step": 0}])
    run_dir.write_summary({"steps": 1})
    names = {entry.name for entry in run_dir.path.iterdir()}
    assert names == {
        *("config.yaml", "events", "metrics.jsonl", "samples.jsonl", "samples.index", "checkpoints", "summary.json"),
    }
    assert run_dir.config_path.read_text() == "algo: gspo\n"


def test_a_file_in_the_way_is_a_usage_error_that_names_the_option(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match=r"taken.*--run-dir"):
        RunDirectory(tmp_path / "taken").create()


def test_every_line_is_valid_json_whatever_the_values(run_dir):
    values = {"a": math.nan, "b": math.inf, "c": np.float32(-math.inf), "d": np.float32(0.5), "e": np.int64(3)}
    run_dir.append_metrics(7, values)

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    record = json.loads(run_dir.metrics_path.read_text(), parse_constant=refuse)
    assert record["step"] == 7
    assert abs(record["time"] - time.time()) < 60
    assert [record[key] for key in "abcde"] == ["NaN", "Infinity", "-Infinity", 0.5, 3]


def test_metrics_read_back_are_the_numbers_that_were_written(run_dir):
    run_dir.append_metrics(0, {"x": 0.1, "y": math.nan, "z": -math.inf})
    (record,) = run_dir.read_metrics()
    assert record["x"] == 0.1
    assert math.isnan(record["y"])
    assert record["z"] == -math.inf


def test_sample_texts_survive_unchanged(run_dir):
    texts = ["NaN", "zwölf ⟨eos⟩\n\tline\u2028two", "\udc80 lone surrogate", '{"a": "b"}']
    run_dir.append_samples([{"step": 0, "completion": text} for text in texts[:2] + texts[3:]])
    assert [record["completion"] for record in run_dir.read_samples()] == texts[:2] + texts[3:]
    run_dir.append_samples([{"step": 1, "completion": texts[2]}])
    assert len(list(run_dir.read_samples())) == 4


def test_a_sample_without_step_is_refused(run_dir):
    with pytest.raises(ValueError, match="step"):
        run_dir.append_samples([{"step": 0}, {"completion": "x"}])
    assert not run_dir.samples_path.exists()


def test_truncation_drops_later_steps_and_the_half_written_line(run_dir):
    for step in range(5):
        run_dir.append_metrics(step, {"train/loss": float(step)})
        run_dir.append_samples([{"step": step, "completion": "x"}] * 2)
    with open(run_dir.metrics_path, "ab") as file:
        file.write(b'{"step": 2, "train/lo')
    assert run_dir.truncate_after(2) == 2 + 1 + 4
    assert [record["step"] for record in run_dir.read_metrics()] == [0, 1, 2]
    assert [record["step"] for record in run_dir.read_samples()] == [0, 0, 1, 1, 2, 2]
    run_dir.append_metrics(3, {})
    assert [json.loads(line)["step"] for line in run_dir.metrics_path.read_text().splitlines()] == [0, 1, 2, 3]


def test_truncation_keeps_the_bytes_of_the_kept_lines(run_dir):
    for step in range(3):
        run_dir.append_metrics(step, {"train/loss": 1 / 3})
    before = run_dir.metrics_path.read_bytes().splitlines(keepends=True)
    run_dir.truncate_after(1)
    assert run_dir.metrics_path.read_bytes() == b"".join(before[:2])


@pytest.mark.parametrize(("step", "kept"), [(-1, []), (0, [0, 1]), (1, [0, 1, 2])])
def test_a_run_that_starts_again_repeats_its_first_evaluation(step, kept, run_dir):
    run_dir.append_eval_samples([{"step": completed, "completion": "x"} for completed in range(4)])
    run_dir.truncate_after(step)
    assert [record["step"] for record in run_dir.read_eval_samples()] == kept


def test_truncation_of_an_empty_run_does_nothing(run_dir):
    assert run_dir.truncate_after(-1) == 0
    assert run_dir.read_metrics() == []


def test_a_reader_of_a_running_run_leaves_out_the_line_being_written(run_dir):
    run_dir.append_metrics(0, {})
    with open(run_dir.metrics_path, "ab") as file:
        file.write(b'{"step": 1}')
    assert [record["step"] for record in run_dir.read_metrics()] == [0]


def test_summary_is_replaced_as_a_whole(run_dir):
    run_dir.write_summary({"accuracy_before": 0.25, "note": "a long text " * 100})
    run_dir.write_summary({"accuracy_after": math.nan})
    assert json.loads(run_dir.summary_path.read_text()) == {"accuracy_after": "NaN"}
    assert not list(run_dir.path.glob("*.tmp"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_error_names_the_file_and_a_remedy(run_dir):
    run_dir.metrics_path.symlink_to("/dev/full")
    with pytest.raises(ArenoError, match=r"metrics\.jsonl.*free disk space") as caught:
        run_dir.append_metrics(0, {})
    assert "--resume" not in str(caught.value), "not all commands that write a run have this option"


def test_lines_of_finished_steps_survive_a_sigkill(run_dir):
    program = (
        "import sys; from areno.storage.run_dir import RunDirectory\n"
        "run_dir, step = RunDirectory(sys.argv[1]), 0\n"
        "while True:\n"
        "    run_dir.append_metrics(step, {'train/loss': 1.0, 'pad': 'x' * 50000})\n"
        "    print(step, flush=True)\n"
        "    step += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(run_dir.path)], stdout=subprocess.PIPE, text=True)
    seen = [int(child.stdout.readline()) for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    seen += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    child.wait(timeout=30)
    steps = [record["step"] for record in run_dir.read_metrics()]
    assert steps[: len(seen)] == seen
    run_dir.truncate_after(seen[-1])
    lines = run_dir.metrics_path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == seen
