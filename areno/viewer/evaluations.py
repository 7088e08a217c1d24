"""Compares the answers of two evaluations of a run, prompt by prompt."""

from typing import Any

from areno.viewer.catalog import OpenedRun

_MOST_PROMPTS = 100
"""Maximum number of prompts per evaluation; areno records far fewer."""


def evaluations(run: OpenedRun, before: int | None, after: int | None) -> dict[str, Any]:
    """Return the answers to the same held-out prompts in two evaluations, by default the first and the last evaluation.

    Returns:
        - ``steps``: for each recorded evaluation, the number of training steps completed before it
        - ``before`` and ``after``: the steps of the two evaluations
        - ``prompts``: for each prompt, ``prompt_index``, ``prompt``, and the records ``before`` and ``after``. A record is
          null if its evaluation lacks the prompt.
    """
    steps = list(dict.fromkeys(record["step"] for record in run.files.read_eval_samples()))
    if not steps:
        return {"steps": [], "before": None, "after": None, "prompts": []}
    first, last = steps[0] if before is None else before, steps[-1] if after is None else after
    answers: dict[int, dict[int, dict[str, Any]]] = {first: {}, last: {}}
    for record in run.files.read_eval_samples():
        evaluated, index = answers.get(record["step"]), record.get("prompt_index")
        if evaluated is not None and isinstance(index, int) and (index in evaluated or len(evaluated) < _MOST_PROMPTS):
            evaluated[index] = record
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
    return {"steps": steps, "before": first, "after": last, "prompts": prompts}
