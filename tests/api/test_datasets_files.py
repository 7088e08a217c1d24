"""Data files of every format yield the same rows, and errors locate bad rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areno.api.datasets import load_rows
from areno.errors import DataError, UsageError

ROWS = [
    {"prompt": "1+1, quickly", "answer": 2, "note": None},
    {"prompt": 'say "hi"\tnow\nplease', "answer": 3, "note": "naïve 🙂"},
    {"prompt": "2024-01-02", "answer": 4, "note": "x"},
]


def _write_jsonl(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _write_separated(path: Path, separator: str) -> Path:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["prompt", "answer", "note"])
        writer.writerows([row["prompt"], row["answer"], row["note"] or ""] for row in ROWS)
    return path


def _write_arrow(path: Path, new_writer) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, new_writer(file, table.schema) as writer:
        writer.write_table(table)
    return path


def _write_parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


WRITERS = {
    "rows.jsonl": _write_jsonl,
    "lines.json": _write_jsonl,
    "array.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)) and path,
    "array.jsonl": lambda path: path.write_text("\ufeff " + json.dumps(ROWS), encoding="utf-8") and path,
    "rows.parquet": _write_parquet,
    "rows.csv": lambda path: _write_separated(path, ","),
    "rows.tsv": lambda path: _write_separated(path, "\t"),
    "file.arrow": lambda path: _write_arrow(path, pa.ipc.new_file),
    "stream.arrow": lambda path: _write_arrow(path, pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_format_gives_the_same_rows(tmp_path, name):
    path = WRITERS[name](tmp_path / name)
    rows = load_rows(str(path))
    assert isinstance(rows, datasets.Dataset)
    assert list(rows) == ROWS


def test_tsv_is_split_at_tabs_and_not_at_commas(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("prompt\tanswer\n1, 2, 3\t6\n")
    assert list(load_rows(str(path))) == [{"prompt": "1, 2, 3", "answer": 6}]


def test_csv_columns_become_numbers_unless_something_would_be_lost(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("code,count,share,mixed,id\n007,1,0.5,1,12345678901234567890123\n010,,2,x,1\n\n")
    assert list(load_rows(str(path))) == [
        {"code": "007", "count": 1, "share": 0.5, "mixed": "1", "id": "12345678901234567890123"},
        {"code": "010", "count": None, "share": 2.0, "mixed": "x", "id": "1"},
    ]


def test_keys_of_all_json_rows_become_columns_and_dates_stay_text(tmp_path):
    path = _write_jsonl(tmp_path / "rows.jsonl", [{"a": 1}, {"b": "2024-01-02T03:04:05"}, {"a": 2.5, "c": {"d": [1]}}])
    assert load_rows(str(path))[:] == {
        "a": [1.0, None, 2.5],
        "b": [None, "2024-01-02T03:04:05", None],
        "c": [None, None, {"d": [1]}],
    }


def test_long_files_keep_the_row_order_and_widen_column_types(tmp_path):
    rows = [{"i": index, "x": index if index < 25_000 else index + 0.5} for index in range(45_000)]
    loaded = load_rows(str(_write_jsonl(tmp_path / "rows.jsonl", rows)))
    assert loaded["i"][:] == list(range(45_000))
    assert loaded[44_999] == {"i": 44_999, "x": 44_999.5}


def test_changed_file_is_reread_and_no_cache_is_left_behind(tmp_path):
    path = tmp_path / "rows.jsonl"
    home = tmp_path / "home"
    code = (
        "import sys; from areno.api.datasets import load_rows; rows = load_rows(sys.argv[1]); "
        "print([row['n'] for row in rows.map(lambda row: {'n': row['n'] * 2})])"
    )
    environment = os.environ | {"HF_HOME": str(home), "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    stamp = (1_700_000_000, 1_700_000_000)
    for number in (1, 2):
        _write_jsonl(path, [{"n": number}])
        os.utime(path, stamp)
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"[{number * 2}]"
    assert not [file for file in home.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("bad.jsonl", b'{"a": 1}\n\n{"a": 2,}\n', ["bad.jsonl, line 3", "not valid JSON"]),
        ("bad.jsonl", b'{"a": 1}\n[1]\n', ["line 2", "must be a JSON object", "[1]"]),
        ("bad.jsonl", b'{"a": 1}\n"\xff"\n', ["line 2", "not valid JSON"]),
        (
            "bad.jsonl",
            b'{"a": 1}\n{"a": "b"}\n',
            ["line 2", "key `a`", "'b', whose type differs from that of earlier rows"],
        ),
        ("bad.jsonl", b'{"a": "x"}\n{"a": {"b": 1}}\n', ["line 2", "key `a`", "{'b': 1}"]),
        ("bad.jsonl", b'{"a": 99999999999999999999999}\n', ["line 1", "key `a`", "which Arrow cannot store"]),
        ("bad.jsonl", b'{"a": "ok"}\n{"a": "\\ud800"}\n', ["line 2", "key `a`", "which Arrow cannot store"]),
        ("bad.json", b'[{"a": 1}, {"a": 2}, {"a": [3]}]', ["row 3", "key `a`"]),
        ("bad.json", b'[{"a": 1},\n {"a" 2}]', ["not valid JSON", "line 2"]),
        ("bad.json", b'{\n "a": 1\n}', ["line 1", "array of objects"]),
        ("bad.csv", b"a,b\n1,2\n1,2,3\n", ["row 2 (line 3)", "3 fields", "header has 2"]),
        ("bad.csv", b'a,b\n1,2\n"open,2\n', ["row 2", "unexpected end"]),
        ("bad.csv", b"a,a\n1,2\n", ["repeats the name a"]),
        ("bad.csv", b"", ["first line must name the columns"]),
        ("bad.csv", b"a,b\n\xff,2\n", ["UTF-8"]),
        ("bad.parquet", b"not parquet", ["not a readable Parquet file"]),
        ("bad.arrow", b"not arrow", ["in neither Arrow's file format nor Arrow's stream format"]),
    ],
)
def test_errors_locate_bad_content(tmp_path, name, content, parts):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_saved_dataset_folder_gives_its_train_split(tmp_path):
    train = datasets.Dataset.from_list(ROWS)
    train.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": train, "test": train.select([0])}).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"validation": train}).save_to_disk(tmp_path / "held_out")
    assert list(load_rows(str(tmp_path / "single"))) == ROWS
    assert list(load_rows(str(tmp_path / "splits"))) == ROWS
    with pytest.raises(UsageError, match=r"no split `train`.*validation"):
        load_rows(str(tmp_path / "held_out"))
    next((tmp_path / "single").glob("*.arrow")).write_bytes(b"broken")
    with pytest.raises(DataError, match="damaged"):
        load_rows(str(tmp_path / "single"))


def test_files_of_a_folder_are_read_in_name_order(tmp_path):
    _write_jsonl(tmp_path / "b.jsonl", [{"n": 2}])
    _write_jsonl(tmp_path / "a.jsonl", [{"n": 1}])
    (tmp_path / "README.md").write_text("about")
    _write_jsonl(tmp_path / ".hidden.jsonl", [{"n": 0}])
    assert load_rows(str(tmp_path))["n"][:] == [1, 2]


def test_folder_never_mixes_held_out_files_into_training(tmp_path):
    _write_jsonl(tmp_path / "train-00001.jsonl", [{"n": 2}])
    _write_jsonl(tmp_path / "train-00000.jsonl", [{"n": 1}])
    _write_jsonl(tmp_path / "test.jsonl", [{"n": 9}])
    assert load_rows(str(tmp_path))["n"][:] == [1, 2]
    for file in tmp_path.glob("train*"):
        file.unlink()
    with pytest.raises(
        UsageError, match="no files of the split train; it has files of the split test; pass a single file"
    ):
        load_rows(str(tmp_path))


def test_folder_gives_the_requested_split(tmp_path):
    for number, name in enumerate(("extra", "train-0", "train-1", "TEST_a", "val.part", "test_prefs")):
        _write_jsonl(tmp_path / f"{name}.jsonl", [{"n": number}])

    def rows(split):
        return sorted(load_rows(str(tmp_path), split=split)["n"][:])

    assert rows("train") == [1, 2]
    assert rows("test") == [3, 5]
    assert rows("validation") == rows("dev") == [4]
    assert rows("test_prefs") == [5]
    with pytest.raises(
        UsageError, match="no files of the split extra2; it has files of the splits test, train, validation"
    ):
        rows("extra2")
    (tmp_path / "val.part.jsonl").unlink()
    with pytest.raises(UsageError, match="no files of the split validation"):
        rows("validation")


def test_folder_without_split_names_is_one_data_set(tmp_path):
    for number in (1, 2):
        _write_jsonl(tmp_path / f"part{number}.jsonl", [{"n": number}])
    assert load_rows(str(tmp_path), split="test")["n"][:] == load_rows(str(tmp_path))["n"][:] == [1, 2]


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(UsageError, match="it has no data files"):
        load_rows(str(tmp_path))
    _write_jsonl(tmp_path / "a.jsonl", [{"n": 1}])
    _write_jsonl(tmp_path / "b.jsonl", [{"n": "two"}])
    with pytest.raises(DataError, match=r"b\.jsonl: the columns do not match"):
        load_rows(str(tmp_path))
    (tmp_path / "c.csv").write_text("n\n1\n")
    with pytest.raises(UsageError, match=r"several formats \(\.csv, \.jsonl\)"):
        load_rows(str(tmp_path))


def test_unknown_suffix_is_refused(tmp_path):
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(UsageError, match=r"one of the suffixes .*, got \.txt"):
        load_rows(str(tmp_path / "rows.txt"))
