"""What a report says about data, memory, checkpoints, expected answers, truncation and equal rewards."""

from __future__ import annotations

import json

import numpy as np
import pytest

from areno.observability.step_memory import AVAILABLE, PEAK, PEAK_GPU
from areno.reports.report import report_html
from areno.reports.run_data import RunData
from areno.storage.contents import STATE_FILE, STATE_FOLDER
from tests.reports.prepared import OPTIONS, SETTINGS, Page, Prepared, policy_metrics, sample

STEPS = 20


def written(path, *, environment=None, memory=None, **fields):
    metrics = policy_metrics(np.random.default_rng(0), STEPS) | (memory or {})
    run = Prepared(metrics, **fields).write(path / "run")
    run.write_environment(environment or {})
    return run


def page_of(run):
    return Page(report_html(RunData(run.path))).root


def section(run, name):
    return page_of(run).one("section", **{"aria-labelledby": name})


def saves(folder, step):
    state = folder / STATE_FOLDER / STATE_FILE
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"step": step}))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {"examples": 8, "prompts": 8, "steps_per_epoch": 1, "held_out_examples": 64, "held_out_prompts": 60},
            "8 training examples with 8 distinct prompts, each example seen about 20 times in 20 steps; "
            "64 held-out examples with 60 distinct prompts.",
        ),
        (
            {"examples": 123456, "steps_per_epoch": 200},
            "123,456 training examples, 10% of the examples seen in 20 steps; no held-out data.",
        ),
    ],
)
def test_the_header_says_how_much_data_there_is_and_how_often_it_was_seen(data, text, tmp_path):
    assert text in page_of(written(tmp_path, environment={"data": data})).one("header").text


@pytest.mark.parametrize("data", [None, [], {"examples": "many"}, {"examples": 3, "steps_per_epoch": "x"}])
def test_a_run_without_usable_data_sizes_has_a_report(data, tmp_path):
    assert "times in" not in page_of(written(tmp_path, environment={"data": data})).one("header").text


def test_peak_memory_is_shown_with_the_memory_of_the_machine(tmp_path):
    memory = {
        PEAK: np.linspace(1, 6.5, STEPS),
        AVAILABLE: [*np.linspace(9, 0.25, STEPS - 1), 3.0],
        PEAK_GPU: np.full(STEPS, 70.5),
    }
    environment = {"memory_bytes": 16 * 2**30, "gpu_memory_bytes": 80 * 2**30}
    time = section(written(tmp_path, memory=memory, environment=environment), "time")
    assert (
        "Memory: the processes of the run used at most 6.5 GiB of 16.0 GiB; at least 0.2 GiB were available after each step, "
        "and 3.0 GiB after the last step; tensors used at most 70.5 GiB of 80.0 GiB on a GPU." in time.text
    )
    (chart,) = [figure for figure in time.all("figure") if "Memory, in GiB" in figure.text]
    assert all(name in chart.text for name in memory)


def test_a_report_without_recorded_memory_does_not_mention_memory(tmp_path):
    assert "GiB" not in section(written(tmp_path), "time").text


def test_the_header_lists_checkpoints_and_models_of_a_run(tmp_path):
    run = written(tmp_path)
    assert "No checkpoint exists." in page_of(run).one("header").text
    for step in (5, 10):
        saves(run.checkpoints_path / f"step_{step:06d}", step)
    saves(run.checkpoints_path / "best", 7)
    (run.checkpoints_path / ".partial-step_000015").mkdir()
    (run.checkpoints_path / "models" / "step_000020").mkdir(parents=True)
    assert (
        "Checkpoints exist for steps 5, 10; the best evaluated checkpoint is from step 7; models without training state "
        "exist for step 20." in page_of(run).one("header").text
    )


def test_many_checkpoints_are_counted(tmp_path):
    run = written(tmp_path)
    for step in range(1, 13):
        saves(run.checkpoints_path / f"step_{step:06d}", step)
    assert "Checkpoints exist for 12 steps, 1 to 12." in page_of(run).one("header").text


def test_the_models_of_an_experiment_are_listed_by_completed_steps(tmp_path):
    run = written(tmp_path, config=SETTINGS)
    (run.checkpoints_path / "default" / "epoch0epochstep9globalstep9").mkdir(parents=True)
    assert "No checkpoint exists; models without training state exist for step 10." in page_of(run).one("header").text


def test_a_copy_of_an_experiment_whose_checkpoints_were_not_copied_has_a_report(tmp_path):
    run = written(tmp_path, config=SETTINGS)
    run.checkpoints_path.rmdir()
    run.checkpoints_path.symlink_to("../../checkpoints/elsewhere")
    page = page_of(run)
    assert "heckpoint exist" not in page.one("header").text
    rows = [
        [cell.text for cell in row.all("td")] for row in page.one("section", **{"aria-labelledby": "files"}).all("tr")
    ]
    assert ["checkpoints", "missing", "models and training states to resume from"] in rows


@pytest.mark.parametrize("path", [7, ["a"], {"b": 1}, "\0"])
def test_settings_of_the_wrong_type_do_not_break_a_report(path, tmp_path):
    page = page_of(written(tmp_path, config={**OPTIONS, "save_path": path}))
    other = page_of(written(tmp_path / "other", config={**SETTINGS, "recover": path, "saver": {"fileroot": path}}))
    assert all(one.all("section", **{"aria-labelledby": "files"}) for one in (page, other))


def test_the_expected_answer_is_shown_with_each_sample_and_comparison(tmp_path):
    samples = [
        sample(step, 0, number, float(number), data={"solutions": "['<7>']", "level": "3"})
        for step in range(3)
        for number in range(2)
    ]
    run = written(tmp_path, samples=samples)
    run.append_eval_samples([sample(step, 0, 0, 0.0, data={"solutions": "9"}) for step in (0, 20)])
    for box in section(run, "samples").all("article"):
        assert "solutions: ['<7>']\nlevel: 3" in [text.text for text in box.all("p")]
    (compared,) = section(run, "compared").all("article")
    assert "solutions: 9" in compared.text


def test_a_truncated_answer_is_marked_before_and_after(tmp_path):
    run = written(tmp_path)
    for step, reason in ((0, "length"), (20, "stop")):
        run.append_eval_samples([sample(step, 0, 0, 0.5, finish_reason=reason)])
    labels = [label.text for label in section(run, "compared").all("p", class_="label")]
    assert labels == ["Prompt", "Before, step 0, reward 0.5 (truncated)", "After, step 20, reward 0.5"]


def test_samples_with_equal_rewards_are_not_called_best(tmp_path):
    run = written(tmp_path, samples=[sample(step, 0, number, 0.0) for step in range(3) for number in range(2)])
    shown = section(run, "samples")
    assert [heading.text for heading in shown.all("h3")] == ["Latest"]
    assert "All recorded samples have the reward 0." in shown.text
    assert shown.all("article")[0].attributes["id"].startswith("sample-2-")


@pytest.mark.parametrize(
    ("evaluation", "title"),
    [
        ({"eval/rewards_mean": 0.5, "eval/accuracy": 1.0}, "Evaluation: share of rewards above 0"),
        ({"eval/loss": 0.5, "eval/accuracy": 1.0}, "Evaluation: share of pairs ranked correctly"),
    ],
)
def test_the_accuracy_of_an_evaluation_is_titled_by_what_it_measures(evaluation, title, tmp_path):
    curves = section(written(tmp_path, evaluations={0: evaluation, 20: evaluation}), "curves").text
    assert f"{title}eval/accuracy" in curves
    assert "Evaluation: accuracy" not in curves


def test_chosen_settings_are_shown_and_defaults_are_collapsed(tmp_path):
    configuration = section(
        written(tmp_path, config={**OPTIONS, "reward_weights": "exact=0", "top_k": -1}), "configuration"
    )
    (folded,) = configuration.all("details")
    assert "top_k" in folded.text
    assert "reward_weights" not in folded.text
    assert [cell.text for cell in configuration.all("table")[0].all("td")][-2:] == ["reward_weights", "exact=0"]
