"""What differs between two configurations, and the answers to the same prompts in two evaluations."""

from collections.abc import Iterator, Mapping
from typing import Any

from areno.reports.run_data import read_config
from areno.viewer.catalog import OpenedRun
from areno.viewer.tails import stream_records


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two nested mappings: ``different`` (a list of ``name, left, right``), ``left_only``, ``right_only``, ``equal``.

    Names are dotted; ``equal`` is the number of equal values.
    """
    a, b = dict(_flat(left)), dict(_flat(right))
    both = [name for name in a if name in b]
    different = [{"name": name, "left": a[name], "right": b[name]} for name in both if a[name] != b[name]]
    return {
        "different": different,
        "left_only": [{"name": name, "left": a[name]} for name in a if name not in b],
        "right_only": [{"name": name, "right": b[name]} for name in b if name not in a],
        "equal": len(both) - len(different),
    }


def compare_runs(left: OpenedRun, right: OpenedRun) -> dict[str, Any]:
    """The differences of two runs' configurations and environments."""
    environments = [run.files.read_json(run.files.environment_path) for run in (left, right)]
    for environment in environments:
        environment.pop("recorded", None)  # the time, which always differs
    return {
        "config": differences(read_config(left.path), read_config(right.path)),
        "environment": differences(*environments),
    }


def evaluations(run: OpenedRun, before: int | None, after: int | None) -> dict[str, Any]:
    """The answers to the same held-out prompts in two evaluations, by default the first and the last.

    Returns:
        ``steps`` (completed steps of all evaluations), ``before``, ``after``, and ``prompts``: each with ``prompt_index``,
        ``prompt``, and the records ``before`` and ``after``, null if the evaluation lacks the prompt.
    """
    path = run.files.eval_samples_path
    steps = list(
        dict.fromkeys(record["step"] for record in stream_records(path) if isinstance(record.get("step"), int))
    )
    if not steps:
        return {"steps": [], "before": None, "after": None, "prompts": []}
    first, last = steps[0] if before is None else before, steps[-1] if after is None else after
    answers: dict[Any, dict[int, dict[str, Any]]] = {first: {}, last: {}}
    for record in stream_records(path):
        if record.get("step") in answers and isinstance(record.get("prompt_index"), int):
            answers[record["step"]][record["prompt_index"]] = record
    old, new = answers[first], answers[last]
    prompts = [
        {
            "prompt_index": index,
            "prompt": (new.get(index) or old[index]).get("prompt"),
            "before": old.get(index),
            "after": new.get(index),
        }
        for index in sorted(old.keys() | new.keys())
    ]
    return {"steps": list(steps), "before": first, "after": last, "prompts": prompts}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item
