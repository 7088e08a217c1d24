"""``areno plot`` draws and exports the values of ``metrics.jsonl``."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pyarrow.parquet
import pytest
import yaml

from areno.cli.main import main
from areno.reports.plot import moving
from tests.reports.written_runs import write_run

SVG = "{http://www.w3.org/2000/svg}"


def waves(seed):
    """A reward that goes up and down, differently for each seed."""
    return lambda step, record: {**record, "rollout/rewards_mean": ((step * 7 + seed * 3) % 11) / 11}


def rewards(run):
    return [json.loads(line)["rollout/rewards_mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def plotted(path, *words):
    assert main(["plot", *map(str, words), "--out", str(path)]) == 0
    return ElementTree.parse(path).getroot()


def lines(root):
    """Points of each drawn curve in px; y grows upwards."""
    paths = [path for path in root.iter(f"{SVG}path") if re.fullmatch(r"s\d", path.get("class", ""))]
    drawn = [path.get("d") for path in paths if "h22" not in path.get("d")]  # those are the marks of the legend
    return [np.array([[float(x), -float(y)] for x, y in re.findall(r"([\d.]+) ([\d.]+)", d)]) for d in drawn]


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def assert_proportional(pixels, values):
    """Pixels are a linear function of values, to the rounding of the file."""
    slope, offset = np.polyfit(values, pixels, 1)
    assert slope > 0
    assert np.abs(slope * np.array(values) + offset - pixels).max() < 0.15


def test_curves_of_several_runs_show_their_values_over_steps(tmp_path):
    runs = [write_run(tmp_path / name, steps=9, metrics=waves(seed)) for seed, name in enumerate(("a", "b"))]
    root = plotted(tmp_path / "x.svg", *runs, "--title", "Two seeds", "--width", "6in", "--height", "300px")
    assert (root.get("width"), root.get("height"), root.get("viewBox")) == ("6in", "300px", "0 0 576 300")
    assert {"a", "b", "step", "reward", "Two seeds"} <= set(texts(root))
    values = [rewards(run) for run in runs]
    points = lines(root)
    assert [len(each) for each in points] == [9, 9]
    assert_proportional(np.concatenate([each[:, 1] for each in points]), np.concatenate(values))
    assert_proportional(points[0][:, 0], range(9))


def test_a_name_with_markup_stays_text(tmp_path):
    name = "<script>alert(1)</script>&\x1b"
    run, other = (write_run(tmp_path / each) for each in ("a", "b"))
    root = plotted(tmp_path / "x.svg", f"{name}={run}", other)
    assert not [element.tag for element in root.iter() if "script" in element.tag]
    assert "<script>alert(1)</script>&\\x1b" in texts(root)


def test_the_mean_over_seeds_has_a_band_from_the_lowest_to_the_highest(tmp_path):
    runs = [write_run(tmp_path / f"s{seed}", steps=8 + seed, metrics=waves(seed)) for seed in range(3)]
    root = plotted(tmp_path / "x.svg", "--mean-over", "seeds=" + ",".join(map(str, runs)))
    values = np.array([rewards(run)[:8] for run in runs])
    (band,) = [path for path in root.iter(f"{SVG}path") if path.get("class", "").startswith("band")]
    around = [-float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", band.get("d"))]
    edges = np.concatenate([values.max(0), values.min(0)[::-1]])
    assert_proportional(np.concatenate([lines(root)[0][:, 1], around]), np.concatenate([values.mean(0), edges]))


def test_the_moving_mean_is_that_of_the_surrounding_values(tmp_path):
    run = write_run(tmp_path / "a", steps=12, metrics=waves(1))
    values = rewards(run)
    around = [values[max(0, i - 1) : i + 3] for i in range(12)]  # four values: one before, two after
    root = plotted(tmp_path / "x.svg", run, "--smooth", 4)
    assert_proportional(lines(root)[0][:, 1], [sum(each) / len(each) for each in around])
    mean, low, high = moving(np.array([1.0, np.nan, 4.0, np.inf, 2.0]), 2)
    assert mean.tolist() == [1.0, 4.0, 4.0, 2.0, 2.0]
    assert (low.tolist(), high.tolist()) == ([1.0, 4.0, 4.0, 2.0, 2.0],) * 2
    assert np.isnan(moving(np.array([np.nan, 1.0]), 1)[0]).tolist() == [True, False]


def test_the_x_axis_can_be_tokens_or_time(tmp_path):
    lengths = [10, 50, 20, 5, 40]
    more = lambda step, record: {**record, "rollout/num_sequences": 2, "rollout/response_len_mean": lengths[step]}  # noqa: E731
    run = write_run(tmp_path / "a", steps=5, metrics=more)
    root = plotted(tmp_path / "x.svg", run, "--x", "tokens")
    assert_proportional(lines(root)[0][:, 0], np.cumsum([2 * length for length in lengths]))
    assert "tokens" in texts(root)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [0, 60, 600, 660, 3600]
    text = "".join(
        json.dumps({**record, "time": 1e9 + time}) + "\n" for record, time in zip(records, times, strict=True)
    )
    (run / "metrics.jsonl").write_text(text)
    root = plotted(tmp_path / "x.svg", run, "--x", "time")
    assert_proportional(lines(root)[0][:, 0], times)
    assert "minutes" in texts(root)


@pytest.mark.parametrize("smooth", [1, 3])
def test_an_evaluation_has_the_tokens_of_the_steps_completed_before_it(smooth, tmp_path):
    lengths, scores = [10, 50, 20], {0: 0.1, 1: 0.3, 3: 0.9}  # the last evaluation follows the last step

    def with_length(step, record):
        return {"rollout/num_sequences": 2, "rollout/response_len_mean": lengths[step]}

    for name, kept in (("all", scores), ("last", {3: 0.9})):
        run = write_run(tmp_path / name, steps=3, metrics=with_length, samples=None)
        with (run / "metrics.jsonl").open("a") as file:
            for step, score in kept.items():
                file.write(json.dumps({"step": step, "time": 1e9, "eval/rewards_mean": score}) + "\n")
        words = (run, "--metric", "eval_reward", "--x", "tokens", "--smooth", smooth)
        root = plotted(tmp_path / f"{name}.svg", *words)
        if name == "all":
            assert_proportional(lines(root)[0][:, 0], [0, 20, 160])


def test_runs_without_a_common_step_have_no_mean(tmp_path, capsys):
    def evaluated(steps):
        return lambda step, record: record | ({"eval/rewards_mean": 0.5} if step in steps else {})

    runs = [write_run(tmp_path / name, metrics=evaluated(at)) for name, at in (("a", {0, 2}), ("b", {1, 3}))]
    words = ("--mean-over", f"avg={runs[0]},{runs[1]}", "--metric", "eval_reward", "--metric", "loss", "--smooth", 3)
    root = plotted(tmp_path / "x.svg", *words)
    assert [len(lines(chart)) for chart in root] == [0, 1]
    note = "note: avg has no eval_reward, because there is no step for which all runs of avg have a value"
    assert note in capsys.readouterr().err


def test_a_long_run_keeps_its_extremes(tmp_path):
    spikes = lambda step, record: {"rollout/rewards_mean": 5.0 if step == 1234 else 0.5}  # noqa: E731
    run = write_run(tmp_path / "a", steps=3000, metrics=spikes, samples=None)
    (points,) = lines(plotted(tmp_path / "x.svg", run))
    assert len(points) <= 500
    assert_proportional(points[:, 1], np.where(points[:, 1] > points[0, 1] + 1, 5.0, 0.5))
    assert points[:, 1].max() > points[0, 1] + 100


def test_several_metrics_are_charts_stacked_vertically(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", metrics=lambda step, record: {"rollout/rewards_mean": 0.5})
    root = plotted(tmp_path / "x.svg", run, other, "--metric", "reward", "--metric", "train/*norm")
    assert [chart.get("y") for chart in root] == ["0", "360"]
    assert root.get("height") == "720px"
    assert "train/grad_norm" in texts(root[1])
    assert len(lines(root[1])) == 1
    assert "note: b has no train/grad_norm" in capsys.readouterr().err


def experiment_of(path):
    run = write_run(path, metrics=lambda step, record: {"rollout/reward/avg": step / 10, "nothing": float("nan")})
    (run / "config.yaml").write_text(yaml.safe_dump({"experiment_name": "e"}))
    return run


def test_a_table_has_a_metric_under_each_name_that_was_asked_for(tmp_path):
    run, out = write_run(tmp_path / "a", steps=4), tmp_path / "x.csv"
    names = ["reward", "rollout/rewards_mean"]
    assert main(["plot", str(run), "--metric", names[0], "--metric", names[1], "--out", str(out)]) == 0
    with out.open(newline="") as file:
        rows = [(row["metric"], float(row["value"])) for row in csv.DictReader(file)]
    for name in names:
        assert [value for metric, value in rows if metric == name] == pytest.approx(rewards(run))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_hold_every_value_in_long_form(suffix, tmp_path):
    runs = [write_run(tmp_path / "a"), experiment_of(tmp_path / "b")]
    out = tmp_path / f"x.{suffix}"
    assert main(["plot", *map(str, runs), "--metric", "*", "--out", str(out)]) == 0
    if suffix == "csv":
        with out.open(newline="") as file:
            rows = [{**row, "step": int(row["step"])} for row in csv.DictReader(file)]
    else:
        rows = pyarrow.parquet.read_table(out).to_pylist()
    assert list(rows[0]) == ["run", "step", "metric", "value", "time"]
    expected = []
    for run in runs:
        for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            step, time = record.pop("step"), record.pop("time")
            expected += [(run.name, step, name, float(value), time) for name, value in record.items()]
    written = [(row["run"], row["step"], row["metric"], float(row["value"]), float(row["time"])) for row in rows]
    assert repr(written) == repr(expected)  # because NaN is not equal to itself


def test_one_name_selects_the_metric_of_both_front_ends(tmp_path):
    out = tmp_path / "x.csv"
    words = [str(write_run(tmp_path / "a", steps=2)), f"yaml={experiment_of(tmp_path / 'b')}"]
    assert main(["plot", *words, "--metric", "reward", "--out", str(out)]) == 0
    with out.open(newline="") as file:
        rows = [(row["run"], row["metric"], float(row["value"])) for row in csv.DictReader(file)]
    assert rows[:3] == [("a", "reward", 0.0), ("a", "reward", 0.125), ("yaml", "reward", 0.0)]
    assert len(rows) == 6


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_samples_are_a_flat_table(suffix, tmp_path):
    talk = [{"role": "user", "content": "2+2?"}]

    def marked(record):
        if record["step"] == 1:
            record |= {"messages": talk, "completion": 'a "quoted"\nline, \ud800', "reward": float("inf")}
        return record

    run, out = write_run(tmp_path / "a", steps=2, samples=marked), tmp_path / f"x.{suffix}"
    assert main(["plot", str(run), "--samples", "--out", str(out)]) == 0
    if suffix == "csv":
        with out.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = pyarrow.parquet.read_table(out).to_pylist()
    records = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == len(records) == 8
    for row, record in zip(rows, records, strict=True):
        assert (row["run"], int(row["step"]), row["prompt"]) == ("a", record["step"], record["prompt"])
        assert float(row["reward"]) == float(record["reward"])
        assert float(row["reward_part.short"]) == record["reward_parts"]["short"]
        assert json.loads(row["messages"] or "null") == record.get("messages")
        assert row["completion"] == record["completion"].encode(errors="backslashreplace").decode()
        assert row["picked"] == "first"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x.png"], r"use a name that ends in \.svg, \.csv or \.parquet"),
        (
            ["--out", "x.svg", "--metric", "rewrd"],
            r"--metric rewrd matches no recorded metric \(did you mean reward\?\)",
        ),
        (["--out", "x.svg", "--smooth", "0"], "--smooth must be at least 1, got 0"),
        (["--out", "x.svg", "--width", "6cm"], "--width 6cm is not a size of 100 to 10000 pixels"),
        (["--out", "x.csv", "--smooth", "3"], r"--out x.csv: a \.csv file .*; use --smooth only with an \.svg file"),
        (["--out", "x.csv", "--title", "A", "--width", "6in"], r"use --title, --width only with an \.svg file"),
        (["--out", "x.svg", "--samples"], "--samples writes a .csv or .parquet file"),
        (["--out", "x.svg", "--mean-over", "a"], "--mean-over a is malformed; write NAME=RUN,RUN"),
        (["--out", "x.svg", "--mean-over", "m=,"], "--mean-over m=, is malformed; write NAME=RUN,RUN"),
        (["--out", "x.svg", "--mean-over", "a=a"], "--mean-over a=a: another curve also has the name a"),
        (["--out", "no/folder/x.svg"], "--out no/folder/x.svg cannot be written: No such file"),
        (["--out", "no/folder/x.parquet"], "--out no/folder/x.parquet cannot be written"),
        (["--out", "x.svg", "--x", "tokens"], "--x tokens needs the number of generated tokens"),
    ],
)
def test_invalid_options_are_usage_errors(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(write_run(tmp_path / "a")), *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_run_is_needed(tmp_path, capsys):
    assert main(["plot", "--out", str(tmp_path / "x.svg")]) == 2
    assert "areno plot needs at least one run; give its directory" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "x.svg")]) == 2
    assert "is not a run directory" in capsys.readouterr().err
