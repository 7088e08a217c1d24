"""Every metric that a run of ``areno train`` records is documented, and every documented one is recorded somewhere."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest

from areno.cli.main import main
from areno.config import TrainOptions, get_algorithm, list_algorithms, options_of
from areno.config.setting_names import SETTINGS
from areno.observability.metric_advice import ADVICE, advice_for
from areno.observability.train_metrics import documented
from tests.support.cli import task_arguments, write_task
from tests.support.preferences import SUMS, write_rows

REPO = Path(__file__).parents[2]
TABLE = REPO / "areno" / "observability" / "train_metrics.py"
PARTS = "def reward_fn(record):\n    return {'digits': sum(map(str.isdigit, record.completion)), 'length': 1.0}\n"
RUNS = {
    "grpo": ["--kl-coef", "0.1", "--kl-reward-coef", "0.1", "--grpo-dual-clip", "3", "--eval-n-samples", "2"],
    "ppo": ["--use-kl-loss", "--critic-warmup-steps", "0"],
    "sft": [],
    "dpo": [],
}


def names_on_the_page() -> set[str]:
    """Full names in the tables of docs/run-directory.md, whose headings have the prefix."""
    names, prefix = set(), ""
    for line in (REPO / "docs" / "run-directory.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = re.fullmatch(r"### .*: `(\w+/)\*`", line)
            prefix = heading[1] if heading else ""
        elif prefix and line.startswith("| `"):
            names |= {prefix + name for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])}
    return names


def run(algo, folder, checkpoint):
    """Metric names of a run of two steps with an evaluation."""
    task = write_task(folder / "task")
    task["reward.py"].write_text(PARTS)
    arguments = [
        str(word) for word in task_arguments("sft" if algo == "dpo" else algo, checkpoint, task, folder / "run")
    ]
    if algo == "dpo":
        pairs = str(write_rows(folder / "pairs.jsonl", SUMS))
        arguments = [pairs if word == str(task["data.jsonl"]) else word for word in arguments]
        arguments[arguments.index("sft")] = "dpo"
        del arguments[arguments.index("--dataset-loader-fn") :][:2]
    held_out = arguments[arguments.index("--dataset-path") + 1]
    assert (
        main([*arguments, "--eval-dataset-path", held_out, "--eval-max-rows", "3", "--max-steps", "2", *RUNS[algo]])
        == 0
    )
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {name for line in lines for name in json.loads(line)} - {"step", "time"}


@pytest.mark.parametrize("algo", RUNS)
def test_every_metric_of_a_run_is_on_the_page(algo, tmp_path, tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path / "cache"))
    recorded = run(algo, tmp_path, tiny_checkpoint)
    assert len(recorded) > 25
    page = names_on_the_page()
    page |= {f"{kind}/reward_parts/{name}" for kind in ("rollout", "eval") for name in ("digits", "length")}
    assert recorded - (page | {"eval/pass@1", "eval/pass@2"}) == set()
    shown = {
        "grpo": "rollout/reward_parts/digits",
        "ppo": "train/ppo_kl",
        "sft": "eval/perplexity",
        "dpo": "eval/margin",
    }
    assert {shown[algo], "memory/peak_resident_gib", "memory/available_gib"} <= recorded


def test_every_metric_on_the_page_is_produced_somewhere_in_the_code():
    sources = [path.read_text(encoding="utf-8") for path in (REPO / "areno").rglob("*.py") if path != TABLE]
    quoted = set(re.findall(r"[\"'/]([\w@{}]+)[\"']", "\n".join(sources)))
    composed = {"NAME", "pass@K", "num_sequences", "skipped_long", "total_skipped_long"}
    affixes = re.compile(r"^(critic_|dpo_|pair_|rm_)|_(mean|std|min|max)$")
    missing = []
    for name in names_on_the_page():
        short = name.rpartition("/")[2]
        forms = {short, affixes.sub("", short), re.sub(r"^(critic|dpo|pair|rm)_", "", short)}
        forms |= {f"{re.sub('_(mean|std|min|max)$', '', short)}_{{name}}"}
        if not forms & (quoted | composed):
            missing.append(name)
    assert missing == []


def test_the_page_is_up_to_date_with_make_metrics():
    spec = importlib.util.spec_from_file_location("make_metrics", REPO / "docs" / "make_metrics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python docs/make_metrics.py"


def test_a_name_is_documented_once():
    names = [metric.name for _, metric in documented()]
    assert len(names) == len(set(names)) > 150


def test_advice_covers_the_metrics_that_matter_and_only_existing_ones():
    page = names_on_the_page()
    assert ADVICE.keys() - page == set()
    assert len(ADVICE) >= 40
    matter = (
        "reward_mean zero_std_groups truncated_ratio entropy clip_fraction logp_abs_diff_mean grad_norm staleness_max"
    )
    assert [name for name in matter.split() if advice_for(f"train/{name}") is None] == []


def test_options_in_advice_exist():
    entries = [*options_of(TrainOptions)]
    entries += [entry for name in list_algorithms() for entry in get_algorithm(name).own_options()]
    flags = {entry.flag for entry in entries} | {f"--no-{entry.flag[2:]}" for entry in entries if entry.kind is bool}
    text = " ".join(f"{one.normal} {one.remedy}" for one in ADVICE.values())
    named = set(re.findall(r"(?<![\w-])--[a-z0-9-]*[a-z0-9]", text)) | {name.split()[0] for name in SETTINGS}
    assert named - flags == set()


def test_first_values_of_preference_training_are_normal():
    ipo = math.pow(1 / (2 * 0.1), 2)
    simpo = -math.log(1 / (1 + math.exp(1.0)))  # of equal rewards, with a gamma of 1
    first = {"train/dpo_loss": ipo, "dpo/loss": ipo, "train/pair_loss": simpo, "train/pair_reward_margin": -0.3}
    first |= dict.fromkeys(["train/dpo_accuracy", "dpo/reward_accuracy", "train/rm_accuracy", "rw/correct_ratio"], 0.0)
    for name, value in first.items():
        assert advice_for(name).accepts(value) is not False, name
    for name in ("loss", "accuracy", "reward_margin", "chosen_reward"):
        advice = advice_for(f"train/pair_{name}")
        assert "0.69" not in advice.text
        assert "--dpo" not in advice.remedy
