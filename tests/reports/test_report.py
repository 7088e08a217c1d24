"""The report shows the contents of a run's files, whatever they contain and however large they are."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from areno.cli.main import main
from areno.reports import report
from areno.reports.report import ReportRefresher, report_html, write_report
from areno.reports.run_data import RunData
from areno.storage.run_dir import RunDirectory
from areno.storage.sample_index import ENTRY, FLAGS, index_path
from tests.reports.charts import elements, points, scale
from tests.reports.prepared import OPTIONS, SETTINGS, Page, Prepared, policy_metrics, prompt_samples, row, sample

STEPS = 60


def page_of(run: RunDirectory) -> Page:
    return Page(report_html(RunData(run.path)))


def healthy(path, **fields):
    rng = np.random.default_rng(0)
    evaluations = {
        step: {"eval/rewards_mean": 0.2 + step / 100, "eval/rewards_std": 0.4, "eval/num_samples": 100}
        for step in (0, 30, 60)
    }
    prepared = Prepared(policy_metrics(rng, STEPS), evaluations=evaluations, samples=prompt_samples(rng, STEPS))
    for name, value in fields.items():
        setattr(prepared, name, value)
    return prepared.write(path / "run")


def recorded(run, name):
    """A metric's values, read without areno."""
    records = map(json.loads, run.metrics_path.read_text().splitlines())
    return [(record["step"], record[name]) for record in records if name in record]


def charts(source):
    """The charts of a page, by metric."""
    figures = re.findall(r"<figcaption>.*?<code>(.*?)</code></figcaption>\s*(<svg.*?</svg>)", source, re.DOTALL)
    return dict(figures)


def test_curves_show_the_numbers_of_the_metrics(tmp_path):
    run = healthy(tmp_path)
    drawn = charts(report_html(RunData(run.path)))
    names = {
        "rollout/rewards_mean",
        "train/entropy",
        "train/grad_norm",
        "rollout/response_len_mean",
        "eval/rewards_mean",
    }
    assert names <= drawn.keys()
    for name in names:
        steps, values = zip(*recorded(run, name), strict=True)
        x_of, y_of = scale(drawn[name])
        (line,) = elements(drawn[name], "path", "s0")
        shown = points(line.get("d"))
        assert [x_of(x) for x, _ in shown] == pytest.approx(steps, abs=0.2)
        assert [y_of(y) for _, y in shown] == pytest.approx(values, abs=(max(values) - min(values)) / 100)
    (band,) = elements(drawn["rollout/rewards_mean"], "path", "band")
    means, deviations = ([value for _, value in recorded(run, f"rollout/rewards_{name}")] for name in ("mean", "std"))
    _, y_of = scale(drawn["rollout/rewards_mean"])
    tops = [y_of(y) for _, y in points(band.get("d"))][:STEPS]
    assert tops == pytest.approx([mean + std for mean, std in zip(means, deviations, strict=True)], abs=0.02)


def test_the_page_is_complete_and_accessible(tmp_path):
    page = page_of(healthy(tmp_path)).root
    assert [heading.text for heading in page.all("h2")] == [
        *("Verdict", "Curves", "Before and after", "Time and memory", "Samples"),
        *("Warnings", "Configuration", "Environment", "Files"),
    ]
    levels = [int(element.tag[1]) for element in page.all() if re.fullmatch("h[1-6]", element.tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert page.one("html").attributes["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer", "h1"):
        page.one(landmark)
    ids = [element.attributes["id"] for element in page.all() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    targets = [link.attributes["href"] for link in page.all("a")]
    assert len(targets) >= 10
    assert {target.removeprefix("#") for target in targets} <= set(ids)
    for section in page.all("section"):
        assert section.attributes["aria-labelledby"] in ids
    for chart in page.all("svg"):
        assert chart.attributes["role"] == "img"
        assert len(chart.attributes["aria-label"]) > 10
    for table in page.all("table"):
        assert all("scope" in cell.attributes for cell in table.all("th"))
    assert page.one("head").one("title").text == "run: report of a run"


def test_the_page_is_self_contained(tmp_path):
    source = report_html(RunData(healthy(tmp_path).path))
    page = Page(source).root
    attributes = [attribute for element in page.all() for attribute in element.attributes.items()]
    assert not [
        name for name, _ in attributes if name.startswith("on") or name in ("src", "srcset", "style", "data", "action")
    ]
    assert all(value.startswith("#") for name, value in attributes if name in ("href", "xlink:href"))
    assert not page.all("script") + page.all("link") + page.all("iframe") + page.all("img")
    assert re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", source) == []
    (policy,) = [meta for meta in page.all("meta") if meta.attributes.get("http-equiv") == "Content-Security-Policy"]
    style = page.one("style").text
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.attributes["content"].startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style


EVIL = "</style><script>alert(1)</script>{{ 7*7 }}\x00\x1b[2J\u202egnp\u2066'\" onload=x <!-- ]]>"
SHOWN = "</style><script>alert(1)</script>{{ 7*7 }}\\x00\\x1b[2J\\u202egnp\\u2066'\" onload=x <!-- ]]>"


def test_text_from_a_model_never_becomes_markup(tmp_path):
    tokens = row(["ok", EVIL, "\udc80"], 1.0)
    tokens[0][0]["role"] = tokens[0][0]["texts"][0] = EVIL
    fields = {"prompt": EVIL, "completion": EVIL, "finish_reason": EVIL, "reward_parts": {EVIL: 1.0}}
    samples = [sample(step, 0, number, float(number), **fields) for step in range(4) for number in range(2)]
    samples[-1]["rows"] = tokens
    config = {**OPTIONS, "algo": EVIL, EVIL: {EVIL: [EVIL]}}
    metrics = policy_metrics(np.random.default_rng(0), 20)
    metrics |= {f"rollout/reward_parts/{EVIL}": np.linspace(0, 1, 20), "rollout/reward_parts/b": np.linspace(1, 0, 20)}
    metrics[f"time/{EVIL}"] = np.ones(20)
    status = {"state": "failed", "error": EVIL, "started": 1.0, "ended": 2.0}
    run = Prepared(metrics, config, samples=samples, status=status).write(tmp_path / "run")
    run.append_warning(3, EVIL)
    run.write_environment({EVIL: EVIL, "packages": {EVIL: EVIL}, "gpus": [EVIL]})
    run.append_eval_samples([{"step": step, "prompt": EVIL, "completion": EVIL, "reward": 0.5} for step in (0, 9)])
    (run.path / "<script>x").write_text("")
    source = report_html(RunData(run.path))
    clean = page_of(healthy(tmp_path)).root
    page = Page(source).root
    assert {element.tag for element in page.all()} <= {element.tag for element in clean.all()} | {"ol", "li", "b"}
    assert not page.all("script")
    assert all(c.isprintable() or c == "\n" for c in source)
    assert (
        len([child for child in page.all() if SHOWN in child.text and not any(SHOWN in c.text for c in child.all())])
        > 20
    )
    assert page.one("", id="ended").text.count(SHOWN) == 1
    write_report(RunData(run.path))  # also encodes invalid text
    assert run.report_path.read_bytes().decode()


def test_a_report_stays_small_and_bounded(tmp_path):
    long = "word " * 1600
    count = 8192
    samples = [
        sample(step, prompt, number, float(number), prompt=long, completion=long * 2, rows=row(["<&> "] * count, -0.5))
        for step in range(3)
        for prompt in range(2)
        for number in range(2)
    ]
    config = {**OPTIONS, **{f"option_{index}": "x" * 500 for index in range(1000)}}
    metrics = {f"rollout/reward_parts/part {index}": np.random.default_rng(0).random(1000) for index in range(50)}
    run = Prepared({**policy_metrics(np.random.default_rng(0), 1000), **metrics}, config, samples=samples).write(
        tmp_path / "run"
    )
    for step in range(600):
        run.append_warning(step, long)
    run.append_eval_samples(
        [{**sample(step, prompt, 0, 0.0), "completion": long} for step in (0, 5) for prompt in range(50)]
    )
    source = report_html(RunData(run.path))
    assert len(source.encode()) < 3_000_000
    page = Page(source).root
    assert len(page.all("span", class_="t")) < 6100
    assert "tokens in the middle of the row are omitted" in page.text
    assert "characters omitted" in page.text


_OPENS = """
import sys, time
from areno.reports.report import RunData, write_report
start = time.process_time()
write_report(RunData(sys.argv[1]))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time() - start, int(peak.split()[1]) / 1024)
"""


def test_ten_thousand_steps_and_a_million_samples_are_reported_quickly(tmp_path):
    """In two seconds and 300 MiB. All index entries point to a few records, because writing a gigabyte takes long."""
    steps, each = 10_000, 100
    run = Prepared(policy_metrics(np.random.default_rng(0), steps)).write(tmp_path / "run")
    lines = [
        (
            json.dumps(sample(step, 1, number, 0.5, completion=f"answer {step}", rows=row(["a "] * 200, 0.1))) + "\n"
        ).encode()
        for step in (0, steps - 1)
        for number in range(50)
    ]
    run.samples_path.write_bytes(b"".join(lines))
    entries = np.zeros(steps * each, ENTRY)
    entries["step"] = np.repeat(np.arange(steps), each)
    entries["prompt"], entries["sample"] = np.tile(np.arange(each) // 4, steps), np.tile(np.arange(each) % 4, steps)
    entries["reward"] = np.random.default_rng(0).integers(0, 2, steps * each)
    entries["flags"] = FLAGS["rows"] | np.tile([FLAGS["first"], FLAGS["best"], FLAGS["worst"], 0], steps * each // 4)
    place = np.minimum(np.arange(steps * each) // (steps * each // 100), 99)
    lengths = np.array([len(line) for line in lines])
    entries["length"], entries["offset"] = lengths[place], (np.cumsum(lengths) - lengths)[place]
    index_path(run.samples_path).write_bytes(entries.tobytes())
    done = subprocess.run([sys.executable, "-c", _OPENS, run.path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 2.0
    assert megabytes < 300
    assert "1,000,000 samples were recorded" in run.report_path.read_text()


def test_sections_that_are_too_large_are_left_out_and_named(tmp_path):
    worst = "\U000e0001" * 8000  # ten visible characters each
    samples = [
        sample(step, 0, 0, 1.0, prompt=worst, completion=worst, rows=row([worst] * 400, 0.5)) for step in range(20)
    ]
    run = healthy(tmp_path, samples=samples)
    source = report_html(RunData(run.path))
    assert len(source.encode()) < 3_000_000
    page = Page(source).root
    assert "Omitted, because the page would be too large: samples." in page.one("header").text
    section = page.one("section", **{"aria-labelledby": "samples"})
    assert [line.text for line in section.all("p")] == ["This section is omitted, because the page would be too large."]


def test_a_section_that_is_left_out_does_not_look_empty(tmp_path, monkeypatch):
    run = healthy(tmp_path)
    run.append_warning(17, "every response was cut")
    run.append_eval_samples([sample(step, 0, 0, 0.5) for step in (0, 60)])
    monkeypatch.setattr(report, "MAX_BYTES", 1)
    page = page_of(run).root
    for name in ("samples", "compared", "configuration", "warnings"):
        section = page.one("section", **{"aria-labelledby": name})
        assert [line.text for line in section.all("p")] == [
            "This section is omitted, because the page would be too large."
        ]


def test_tokens_show_what_training_did_with_them(tmp_path):
    fields = {"train_logprobs": [-0.5, -0.9, "NaN"], "clipped": [False, True, False]}
    rows = row(["Yes", "\n", " no"], -0.25, **fields)
    rows[0].append({**rows[0][1], "trained": False, "train_logprobs": None, "clipped": None})
    run = healthy(tmp_path, samples=[sample(0, 2, 1, 0.5, reward_parts={"right": 1.0}, rows=rows)])
    page = page_of(run).root
    box = page.one("article", id="sample-0-2-1")
    tokens = [
        (token.attributes["class"], token.text, token.attributes["title"]) for token in box.all("span", class_="t")
    ]
    assert tokens[0] == (
        "t n",
        "Yes",
        "token 0, log-prob -0.5000, advantage -0.25, version 3, log-prob in training -0.5000 (difference +0)",
    )
    assert tokens[1][:2] == ("t n g c", "↵\n")
    assert tokens[1][2].endswith("log-prob in training -0.9000 (difference -0.4), clipped")
    assert tokens[2][:2] == ("t n", " no")
    assert tokens[3] == ("t m", "Yes", "token 0, log-prob -0.5000, not trained, version 3")
    labels = [label.text for label in box.all("p", class_="label")]
    assert labels == [
        "user, turn 0, not trained, 1 token",
        "text, turn 0, trained, weights of version 3, 3 tokens, advantage -0.25",
        "text, turn 0, not trained, weights of version 3, 3 tokens",
    ]
    numbers = box.one("ul").text
    for text in ("Reward 0.5", "Log-prob gap 0.2 on average, at most 0.4", "Clipped 1 of 7 tokens", "part right 1"):
        assert text in numbers


def test_best_worst_and_most_changed_samples_are_shown_once(tmp_path):
    samples = [
        sample(step, prompt, 0, 0.5, prompt=f"prompt {step}/{prompt}") for step in range(10) for prompt in range(4)
    ]
    samples[5]["reward"], samples[6]["reward"] = 2.0, -3.0
    for index, reward in ((0, 0.1), (39, 0.9)):
        samples[index] |= {"prompt": "the same", "reward": reward, "completion": f"answer for {reward}"}
    run = healthy(tmp_path, samples=samples, evaluations={})
    source = report_html(RunData(run.path))
    groups = dict(re.findall(r"<h3>(.*?)</h3>(.*?)(?=<h3>|</section>)", source.split('id="samples"')[1], re.DOTALL))
    assert list(groups) == ["Best", "Worst", "Most changed"]
    assert 'id="sample-1-1-0"' in groups["Best"]
    assert 'id="sample-1-2-0"' in groups["Worst"]
    assert "answer for 0.9" in groups["Best"]
    assert re.search(r'Shown above:.*href="#sample-0-0-0".*href="#sample-9-3-0"', groups["Most changed"])
    compared = Page(source).root.one("section", **{"aria-labelledby": "compared"}).text
    assert "Training prompts that were sampled in several steps" in compared
    assert re.search(r"step 0, reward 0.1\s*answer for 0.1\s*After, step 9, reward 0.9\s*answer for 0.9", compared)


def test_the_same_held_out_prompts_are_compared(tmp_path):
    run = healthy(tmp_path)
    for step in (0, 30, 60):
        answers = [
            {**sample(step, prompt, 0, step / 100), "prompt": f"Held {prompt}?", "completion": f"at {step}"}
            for prompt in range(3)
        ]
        run.append_eval_samples(answers)
    compared = page_of(run).root.one("section", **{"aria-labelledby": "compared"})
    assert len(compared.all("article")) == 3
    assert "steps 0 and 60" in compared.text
    for prompt, box in enumerate(compared.all("article")):
        assert re.search(rf"Held {prompt}\?.*reward 0\s*at 0.*reward 0.6\s*at 60", box.text, re.DOTALL)


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (OPTIONS, "--eval-dataset-path"),
        (SETTINGS, "valid_dataset.path"),
        ({**OPTIONS, "eval_dataset_path": "test.jsonl"}, "--eval-interval"),
        ({**SETTINGS, "valid_dataset": {"path": "test.jsonl"}}, "evaluator.freq_steps"),
    ],
)
def test_without_a_repeated_prompt_the_page_says_how_to_get_one(config, option, tmp_path):
    compared = page_of(healthy(tmp_path, config=config)).root.one("section", **{"aria-labelledby": "compared"})
    assert f"Set {option} to evaluate the same held-out prompts" in compared.text


def test_time_is_divided_among_the_phases(tmp_path):
    run = healthy(tmp_path)
    section = page_of(run).root.one("section", **{"aria-labelledby": "time"})
    rows = {cells[0].text: [cell.text for cell in cells[1:]] for line in section.all("tr") if (cells := line.all("td"))}
    total = 600.0
    for phase, seconds in (("rollout", 3.0), ("reward", 0.5), ("train", 1.0)):
        assert rows[phase] == [f"{seconds:g}", f"{STEPS * seconds:.0f}", f"{STEPS * seconds / total:.0%}"]
    assert rows["outside of steps"] == ["", "300", "50%"]
    bar = section.all("svg")[0].attributes["aria-label"]
    assert bar.endswith("rollout 3 s (60%); reward 0.5 s (10%); train 1 s (20%); other 0.5 s (10%)")


def phase_rows(page):
    lines = page.one("section", **{"aria-labelledby": "time"}).all("tr")
    return {cells[0].text: [cell.text for cell in cells[1:]] for line in lines if (cells := line.all("td"))}


def test_the_time_of_a_killed_run_ends_with_its_last_record(tmp_path):
    killed = {"state": "running", "pid": 1, "host": "here", "started": 1_749_999_900.0}
    rows = phase_rows(page_of(healthy(tmp_path, status=killed)).root)
    total = 100 + 6 * STEPS  # a record every 6 seconds; the last evaluation has step 60
    assert rows["rollout"] == ["3", "180", f"{180 / total:.0%}"]
    assert rows["outside of steps"] == ["", "160", f"{160 / total:.0%}"]


def test_the_time_of_a_resumed_run_counts_from_its_last_start(tmp_path):
    resumed = {"state": "finished", "started": 1_750_000_000.0 + 6 * 40 - 3, "ended": 1_750_000_000.0 + 6 * 40 + 197}
    page = page_of(healthy(tmp_path, status=resumed)).root
    rows = phase_rows(page)
    assert rows["rollout"] == ["3", "60", "30%"]
    assert rows["outside of steps"] == ["", "100", "50%"]
    assert "count from step 40, where the run was resumed" in page.text
    assert re.search("60 steps, resumed .*, took 3 min 20 s since then", page.one("header").text)


def test_configuration_environment_warnings_and_files_are_listed(tmp_path):
    config = {**OPTIONS, "track_api_key": "sk-12345", "nested": {"wandb_api_key": "k", "a": {"b": 3}}, "empty": None}
    run = healthy(tmp_path, config=config)
    run.append_warning(17, "every response was cut; raise --max-new-tokens")
    run.write_environment({"areno": "0.1.0", "memory_bytes": 2**34, "gpus": [], "packages": {"torch": "9.9"}})
    page = page_of(run).root
    tables = {
        name: [
            [cell.text for cell in line.all("td") + line.all("th")]
            for line in page.one("section", **{"aria-labelledby": name}).all("tr")
        ]
        for name in ("configuration", "environment", "warnings", "files")
    }
    settings = dict(tables["configuration"][1:])
    assert settings["lr"] == "0.001"
    assert settings["nested.a.b"] == "3"
    assert "empty" not in settings
    assert "sk-12345" not in page.text
    assert ["0.1.0", "areno"] in tables["environment"]
    assert ["16.0 GiB", "memory"] in tables["environment"]
    assert ["9.9", "torch"] in tables["environment"]
    assert ["none", "gpus"] in tables["environment"]
    assert tables["warnings"][1:] == [["17", "every response was cut; raise --max-new-tokens"]]
    size = run.metrics_path.stat().st_size
    assert ["metrics.jsonl", f"{size / 1000:.3g} kB", "the metrics of each step"] in tables["files"]


def test_the_verdict_links_to_its_samples(tmp_path):
    truncated = {"train/truncated_ratio": np.full(STEPS, 0.6)}
    rng = np.random.default_rng(0)
    samples = [
        {**record, "finish_reason": "length" if record["reward"] < 1 else "stop"}
        for record in prompt_samples(rng, STEPS)
    ]
    page = page_of(healthy(tmp_path, metrics=policy_metrics(rng, STEPS, **truncated), samples=samples)).root
    (problem,) = page.one("", id="wrong").all("li")
    links = [link.attributes["href"] for link in problem.all("a")]
    assert len(links) == 3
    assert "Raise the limit: --max-new-tokens 512 (now 256)" in problem.text
    named = page.one("section", **{"aria-labelledby": "samples"}).all("article")[:3]
    assert [f"#{box.attributes['id']}" for box in named] == links


def test_an_empty_run_has_a_report(tmp_path):
    run = RunDirectory(tmp_path / "run").create()
    run.write_status({"state": "failed", "error": "UsageError: no data", "started": 0.0, "ended": 1.0})
    text = page_of(run).root.text
    for sentence in ("No step was recorded", "No samples were recorded", "no configuration yet", "UsageError: no data"):
        assert sentence in text


def test_the_command_writes_the_report_and_prints_the_verdict(tmp_path, capsys):
    run = healthy(tmp_path)
    assert main(["report", str(run.path)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("Did the model learn? Yes.")
    assert output.endswith(f"report: {run.report_path}\n")
    written = run.report_path.read_text()
    assert main(["report", str(run.path), "--out", str(tmp_path / "other.html")]) == 0
    other = (tmp_path / "other.html").read_text()
    footer = re.compile(r"<p>Written by.*\n|<tr><td class=\"name\">report.html.*\n")
    assert footer.sub("", other) == footer.sub("", written)
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert main(["report", str(run.path), "--out", str(tmp_path / "none" / "x.html")]) == 1
    assert "--out" in capsys.readouterr().err


def test_the_report_of_a_run_in_progress_is_refreshed_when_it_is_old(tmp_path, monkeypatch):
    run = healthy(tmp_path)
    ReportRefresher(run).refresh()
    assert not run.report_path.exists(), "the run has just started"
    monkeypatch.setattr(report, "REFRESH_S", 0.0)
    refresher = ReportRefresher(run)
    refresher.refresh()
    assert run.report_path.exists()
    run.report_path.unlink()
    refresher.refresh()
    assert not run.report_path.exists(), "refreshed before 100 times its writing time has passed"


def test_a_report_that_cannot_be_written_does_not_stop_the_run(tmp_path, caplog):
    run = healthy(tmp_path)
    run.report_path.mkdir()
    with caplog.at_level(logging.INFO, "areno"), report.report_at_end(run):
        pass
    (record,) = caplog.records
    assert (record.levelname, "the report was not written: ArenoError: cannot write" in record.message) == (
        "WARNING",
        True,
    )


def test_values_that_are_not_finite_do_not_break_a_report(tmp_path):
    samples = [
        sample(step, 0, 0, math.nan, advantage=math.inf, logprob_mean=None, reward_parts={"a": "NaN"})
        for step in range(3)
    ]
    metrics = policy_metrics(np.random.default_rng(0), STEPS)
    for values in metrics.values():
        values[::2] = np.nan
    run = healthy(tmp_path, metrics=metrics, samples=samples, evaluations={0: {"eval/rewards_mean": math.nan}})
    assert "None of the 3 recorded samples has a finite reward" in page_of(run).root.text


def test_the_templates_are_part_of_the_package():
    folder = Path(report.__file__).parent / "templates"
    assert sorted(path.name for path in folder.iterdir()) == ["report.css", "report.html.jinja"]
