"""Writes the metrics or the samples of several runs as one table, in a CSV or Parquet file."""

import csv
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areno.errors import UsageError
from areno.reports.run_data import KEYS, RunData

_CHUNK = 10_000  # rows that are held in memory
_METRICS = {"run": "string", "step": "int64", "metric": "string", "value": "double", "time": "double"}
_SAMPLES = {
    "run": "string",
    **dict.fromkeys(("step", "prompt_index", "sample_index"), "int64"),
    "picked": "string",
    "reward": "double",
    "advantage": "double",
    "finish_reason": "string",
    "response_len": "int64",
    "logprob_mean": "double",
    **dict.fromkeys(("prompt", "completion", "messages"), "string"),
}
_CONVERTERS: dict[str, Callable[[Any], Any]] = {"int64": int, "double": float}

Row = Mapping[str, Any]


def write_metrics(runs: Mapping[str, RunData], metrics: Collection[str], path: Path) -> int:
    """Write one row per value, and return the number of rows.

    The columns are ``run``, ``step``, ``metric``, ``value`` and ``time`` (Unix seconds).

    Args:
        runs: the runs, keyed by their names in the column ``run``.
        metrics: names of metrics. Short names, which are the keys of ``KEYS``, are also allowed: for example, ``reward``
            selects ``rollout/rewards_mean`` or ``rollout/reward/avg``, whichever the run recorded.
        path: a ``.csv`` or ``.parquet`` file. An existing file is replaced.

    Raises:
        UsageError: the file cannot be written.
    """
    with _table(path, _METRICS) as add:
        count = 0
        for run_name, run in runs.items():
            recorded = [(name, run.metric_of(name) if name in KEYS else name) for name in metrics]
            for record in run.files.read_metrics():
                for name, metric in recorded:
                    if metric in record:
                        add((run_name, record["step"], name, record[metric], record.get("time")))
                        count += 1
        return count


def write_samples(runs: Mapping[str, RunData], path: Path) -> int:
    """Write a table with one row per recorded sample. Return the number of samples. The table does not contain tokens.

    The columns ``reward_part.NAME`` have the reward parts. The column ``messages`` has JSON. Raises UsageError if the file
    cannot be written.
    """
    parts = sorted({part for run in runs.values() for part in run.reward_parts()})
    schema = {**_SAMPLES, **{f"reward_part.{part}": "double" for part in parts}}
    with _table(path, schema) as add:
        count = 0
        for run_name, run in runs.items():
            for sample in run.files.read_samples():
                values = {**sample, "run": run_name, "picked": ",".join(sample.get("picked") or ())}
                if sample.get("messages") is not None:
                    values["messages"] = json.dumps(sample["messages"], ensure_ascii=False)
                values |= {f"reward_part.{name}": part for name, part in (sample.get("reward_parts") or {}).items()}
                add([values.get(name) for name in schema])
                count += 1
        return count


@contextmanager
def _table(path: Path, schema: Mapping[str, str]) -> Iterator[Callable[[Sequence[Any]], None]]:
    converters = [_CONVERTERS.get(kind, _text) for kind in schema.values()]
    rows: list[list[Any]] = []
    opener = _parquet if path.suffix == ".parquet" else _csv

    def add(row: Sequence[Any]) -> None:
        rows.append([None if value is None else convert(value) for value, convert in zip(row, converters, strict=True)])
        if len(rows) == _CHUNK:
            write(rows)
            rows.clear()

    try:
        with opener(path, schema) as write:
            yield add
            write(rows)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror or error}; choose another file") from error


def _text(value: Any) -> str:
    return str(value).encode(errors="backslashreplace").decode()  # a file cannot hold lone surrogates


@contextmanager
def _csv(path: Path, schema: Mapping[str, str]) -> Iterator[Callable[[list[list[Any]]], None]]:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(schema)
        yield writer.writerows


@contextmanager
def _parquet(path: Path, schema: Mapping[str, str]) -> Iterator[Callable[[list[list[Any]]], None]]:
    import pyarrow
    import pyarrow.parquet

    columns = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in schema.items()])
    with pyarrow.parquet.ParquetWriter(path, columns) as writer:

        def write(rows: list[list[Any]]) -> None:
            arrays = [[row[index] for row in rows] for index in range(len(schema))]
            writer.write_table(
                pyarrow.table([pyarrow.array(a, f.type) for a, f in zip(arrays, columns, strict=True)], columns)
            )

        yield write
