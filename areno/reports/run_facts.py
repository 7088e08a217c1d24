"""Describes the data, the memory use and the saved models of a run, in one sentence each, for the report of the run."""

from collections.abc import Sequence

from areno.observability.step_memory import AVAILABLE, GIB, PEAK, PEAK_GPU
from areno.reports.checkpoints import saved
from areno.reports.run_data import RunData
from areno.reports.svg import short
from areno.reports.trends import finite
from areno.storage.json_lines import as_float

_LISTED = 8
"""Maximum number of steps that :func:`saved_sentence` lists individually.

If there are more steps, the sentence gives only the number of steps, the first step and the last step.
"""


def data_sentence(run: RunData, steps: int) -> str:
    """Tell how many examples a run has, and how often each example was used in ``steps`` steps; empty if not recorded."""
    data = run.environment.get("data")
    if not isinstance(data, dict) or not data.get("examples"):
        return ""
    text = _examples(data, "training", "examples", "prompts")
    if (per_epoch := as_float(data.get("steps_per_epoch"))) > 0:
        epochs = steps / per_epoch
        seen = f"each example seen about {short(epochs)} times" if epochs > 1 else f"{epochs:.0%} of the examples seen"
        text += f", {seen} in {steps:,} step{'' if steps == 1 else 's'}"
    if "held_out_examples" not in data:
        return f"{text}; no held-out data."
    return f"{text}; {_examples(data, 'held-out', 'held_out_examples', 'held_out_prompts')}."


def _examples(data: dict[str, object], kind: str, examples: str, prompts: str) -> str:
    text = f"{as_float(data[examples]):,.0f} {kind} example{'' if data[examples] == 1 else 's'}"
    return text + (f" with {as_float(data[prompts]):,.0f} distinct prompts" if prompts in data else "")


def memory_sentence(run: RunData) -> str:
    """Compare the peak memory of the run with the memory of its machine; empty if memory was not recorded."""
    peak, left, gpu = (finite(run.metrics[name])[1].tolist() for name in (PEAK, AVAILABLE, PEAK_GPU))
    parts = []
    if peak:
        total = as_float(run.environment.get("memory_bytes")) / GIB
        parts.append(
            f"the processes of the run used at most {max(peak):.1f} GiB" + (f" of {total:.1f} GiB" if total > 0 else "")
        )
    if left:
        parts.append(
            f"at least {min(left):.1f} GiB were available after each step, and {left[-1]:.1f} GiB after the last step"
        )
    if gpu:
        size = as_float(run.environment.get("gpu_memory_bytes")) / GIB
        parts.append(
            f"tensors used at most {max(gpu):.1f} GiB" + (f" of {size:.1f} GiB" if size > 0 else "") + " on a GPU"
        )
    return f"Memory: {'; '.join(parts)}." if parts else ""


def saved_sentence(run: RunData) -> str:
    """Return a sentence on which checkpoints and models of the run exist; ``""`` if this cannot be determined."""
    folder = run.path / "checkpoints"
    if not run.config or (folder.is_symlink() and not folder.exists()):  # a copy of a run without its checkpoints
        return ""
    if (models := saved(run)) is None:
        return ""
    parts = [f"Checkpoints exist for {_steps(models.checkpoints)}" if models.checkpoints else "No checkpoint exists"]
    parts += [f"the best evaluated checkpoint is from step {models.best:,}"] if models.best is not None else []
    parts += [f"models without training state exist for {_steps(models.models)}"] if models.models else []
    return f"{'; '.join(parts)}."


def _steps(steps: Sequence[int]) -> str:
    if len(steps) > _LISTED:
        return f"{len(steps):,} steps, {steps[0]:,} to {steps[-1]:,}"
    return f"step{'' if len(steps) == 1 else 's'} {', '.join(f'{step:,}' for step in steps)}"
