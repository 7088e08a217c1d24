"""Data references: a path is never downloaded, and a failed download gives one clear message."""

import os
import subprocess
import sys

import datasets
import pytest

from areno.api.datasets import _load_from_hub, load_rows, load_training_dataset
from areno.errors import DataError, UsageError


@pytest.mark.parametrize(
    "reference",
    ["./rows", "/no/such/rows", "~/no_such_rows_here", "rows.jsonl", "data/rows.csv", "a/b/c", "rows/", "beside/typo"],
)
def test_missing_path_is_an_error_and_not_a_download(tmp_path, monkeypatch, reference):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside").mkdir()
    with pytest.raises(UsageError, match="no such file or folder"):
        load_rows(reference)


@pytest.mark.parametrize("reference", ["a:b:c:d", "a::c", "a:"])
def test_malformed_hub_reference_is_refused(reference):
    with pytest.raises(UsageError, match="repo:config:split"):
        load_rows(reference)


def test_unreachable_hub_is_an_immediate_usage_error(tmp_path):
    code = (
        "from areno.api.datasets import load_rows\nfrom areno.errors import UsageError\n"
        "try: load_rows('no-such-owner/no-such-data:main')\nexcept UsageError as error: print(error)"
    )
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "no-such-owner/no-such-data could not be loaded from the hub" in done.stdout
    assert "network" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A data repository with two configurations, in the layout of the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "repository"
    root.mkdir()
    lines = ["---", "configs:"]
    for config in ("main", "socratic"):
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "test"):
            (root / f"{config}-{split}.jsonl").write_text(f'{{"where": "{config} {split}"}}\n')
            lines += [f"  - split: {split}", f"    path: {config}-{split}.jsonl"]
    (root / "README.md").write_text("\n".join([*lines, "---", ""]))
    return str(root)


def test_missing_configuration_falls_back_to_main(repository):
    assert list(_load_from_hub("x", repository, None, "train")) == [{"where": "main train"}]


def test_configuration_and_split_are_chosen_by_name(repository):
    assert list(_load_from_hub("x", repository, "socratic", "test")) == [{"where": "socratic test"}]


@pytest.mark.parametrize(
    ("config", "split", "message"),
    [("nonsense", "train", "BuilderConfig 'nonsense' not found"), ("main", "nonsense", 'Unknown split "nonsense"')],
)
def test_unknown_configuration_or_split_is_a_usage_error(repository, config, split, message):
    with pytest.raises(UsageError, match=message):
        _load_from_hub(f"x:{config}:{split}", repository, config, split)


def _rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "a"}\n{"q": "b"}\n')
    return str(path)


def test_without_a_loader_rows_pass_unchanged(tmp_path):
    assert list(load_training_dataset(_rows_file(tmp_path))) == [{"q": "a"}, {"q": "b"}]


def test_loader_gets_the_path_and_the_three_loading_functions(tmp_path):
    def loader(path, *, default_loader, load_dataset, load_from_disk):
        assert (load_dataset, load_from_disk) == (datasets.load_dataset, datasets.load_from_disk)
        return [{"prompt": row["q"]} for row in default_loader(path)]

    assert load_training_dataset(_rows_file(tmp_path), loader) == [{"prompt": "a"}, {"prompt": "b"}]


def test_loader_decides_what_the_path_means():
    assert load_training_dataset("any thing", lambda path, **_: ({"prompt": path},)) == ({"prompt": "any thing"},)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "NoneType"),
        (iter([{}]), "support len()"),
        ([], "no rows"),
        (["text"], "row 1 is of type str"),
        ({"prompt": ["a"]}, "rows[0] of dict raises an error"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list([{"a": 1}])), "choose one of its splits: train"),
    ],
)
def test_unusable_loader_result_is_a_usage_error(result, text):
    with pytest.raises(UsageError, match="--dataset-loader-fn") as caught:
        load_training_dataset("x", lambda path, **_: result)
    assert text in str(caught.value)


def test_error_in_a_loader_names_its_line(tmp_path):
    def loader(path, **_):
        return [{}["missing"]]

    with pytest.raises(UsageError, match=r"KeyError: 'missing' \(.*test_datasets_references\.py:\d+\)"):
        load_training_dataset("x", loader)


def test_data_error_inside_a_loader_stays_a_data_error(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("{")
    with pytest.raises(DataError, match="line 1"):
        load_training_dataset(str(path), lambda path, default_loader, **_: default_loader(path))
