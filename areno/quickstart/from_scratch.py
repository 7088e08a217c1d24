"""``areno quickstart``: creates data and a model, trains with SFT, then with GSPO, and evaluates on held-out problems.

Both training runs use the code of ``areno train``. The equivalent commands are printed.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areno.observability.chart import text_chart
from areno.quickstart.model import make_checkpoint
from areno.quickstart.task import LOADER_FILE, REWARD_FILE, Problem, draw_problems, is_right, problem_count, write_rows
from areno.quickstart.training import run_folder, train
from areno.storage.run_dir import RunDirectory

SFT_STEPS, SFT_BATCH = 400, 32
RL_STEPS, RL_BATCH = 40, 32
HELD_OUT = 400
_HELD_OUT_SEED = 12345  # the same problems for every seed, so that runs are comparable
_EVAL_BATCH = 250
_MAX_NEW_TOKENS = 40
_SFT_WORDINGS = (1, 1, 2)  # weights of the wordings: "step by step" is as frequent as the two plain wordings together

_SFT = {
    "--batch-size": SFT_BATCH,
    "--mini-bs": SFT_BATCH,
    "--epochs": 1,
    "--max-steps": SFT_STEPS,
    "--lr": 3e-3,
    "--min-lr": 0,
    "--lr-warmup-steps": 20,
    "--lr-decay-steps": SFT_STEPS,
    "--lr-decay-style": "linear",
    "--adam-beta2": 0.98,
}
_GSPO = {
    "--batch-size": RL_BATCH,
    "--n-samples": 8,
    "--mini-bs": RL_BATCH * 8,
    "--epochs": 1,
    "--max-steps": RL_STEPS,
    "--max-new-tokens": 40,
    "--lr": 2e-4,
    "--lr-warmup-steps": 5,
    "--lr-decay-style": "constant",
    "--adam-beta2": 0.98,
}


@dataclass(frozen=True, slots=True)
class QuickstartOutcome:
    """Result of the quickstart; its fields are the keys of ``summary.json``."""

    accuracy_before: float
    accuracy_after: float
    seconds: float
    seed: int
    steps: int
    checkpoint: str


def quickstart(seed: int = 0, run_dir: str | None = None) -> QuickstartOutcome:
    """Run the quickstart in ``run_dir`` (default ``runs/quickstart-<time>``) and write ``<run>/summary.json``."""
    start = time.perf_counter()
    root = run_folder(run_dir)
    held_out = draw_problems(_HELD_OUT_SEED, HELD_OUT, held_out=True)
    parameters = _write_inputs(root, seed)
    print(f"1/4  Create a task and a model: {problem_count():,} sums like {held_out[0].question!r},")
    print(f"     1 in 20 of them held out; a Llama with {parameters:,} random parameters.\n")

    print(f"2/4  SFT on {SFT_STEPS * SFT_BATCH:,} correct answers. Some show the work, others only the sum.")
    sft = _train("sft", root, root / "model", seed, _SFT)
    before_texts = answers(sft, held_out)
    before = accuracy(held_out, before_texts)
    print(f"     held-out accuracy {before:.1%}\n")

    print(f"3/4  GSPO for {RL_STEPS} steps. The reward checks the final answer only.")
    checkpoint = _train("gspo", root, sft, seed, _GSPO)

    print("4/4  Load the checkpoint with plain transformers and evaluate on held-out problems.")
    after_texts = answers(checkpoint, held_out)
    after = accuracy(held_out, after_texts)
    seconds = time.perf_counter() - start
    outcome = QuickstartOutcome(before, after, round(seconds, 1), seed, SFT_STEPS + RL_STEPS, str(checkpoint))
    (root / "summary.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")
    _report(root, outcome, held_out, before_texts, after_texts)
    return outcome


def answers(checkpoint: Path, problems: Sequence[Problem]) -> list[str]:
    """Complete each problem greedily with plain ``transformers``, without areno's engine."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    texts: list[str] = []
    for start in range(0, len(problems), _EVAL_BATCH):
        chats = [[{"role": "user", "content": p.question}] for p in problems[start : start + _EVAL_BATCH]]
        encoded: Any = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            output = model.generate(**encoded, do_sample=False, max_new_tokens=_MAX_NEW_TOKENS)
        texts += tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def accuracy(problems: Sequence[Problem], completions: Sequence[str]) -> float:
    """Return the fraction of correct answers."""
    return sum(is_right(p, text) for p, text in zip(problems, completions, strict=True)) / len(problems)


def _write_inputs(root: Path, seed: int) -> int:
    data = root / "data"
    data.mkdir(parents=True)
    demonstrations = draw_problems(seed, SFT_STEPS * SFT_BATCH, held_out=False, weights=_SFT_WORDINGS)
    write_rows(data / "sft.jsonl", demonstrations, seed)
    write_rows(data / "gspo.jsonl", draw_problems(seed + 1000, RL_STEPS * RL_BATCH, held_out=False), seed)
    (data / "loader.py").write_text(LOADER_FILE, encoding="utf-8")
    (data / "reward.py").write_text(REWARD_FILE, encoding="utf-8")
    return make_checkpoint(root / "model", seed)


def _train(algo: str, root: Path, model: Path, seed: int, settings: Mapping[str, object]) -> Path:
    data = root / "data"
    hook = ("--dataset-loader-fn", data / "loader.py") if algo == "sft" else ("--reward-fn-path", data / "reward.py")
    inputs = {"--algo": algo, "--ckpt": model, "--dataset-path": data / f"{algo}.jsonl", hook[0]: hook[1]}
    return train(inputs | dict(settings) | {"--seed": seed, "--world-size": 1, "--run-dir": root / algo})


def _report(
    root: Path, outcome: QuickstartOutcome, held_out: list[Problem], before: list[str], after: list[str]
) -> None:
    rewards = [m["rollout/rewards_mean"] for m in RunDirectory(root / "gspo").read_metrics()]
    print()
    print(text_chart(rewards, width=60, height=8, title="     mean reward of each GSPO step"))
    print("\nAnswers to the same questions, before and after GSPO:")
    changed = [i for i, p in enumerate(held_out) if before[i] != after[i] and not p.wording.startswith("Step")]
    for index in changed[:3]:
        problem = held_out[index]
        print(f"  {problem.question}   (correct: {problem.a + problem.b})")
        print(f"    before  {before[index]}")
        print(f"    after   {after[index]}")
    print(
        f"\nHeld-out accuracy: {outcome.accuracy_before:.1%} after SFT, {outcome.accuracy_after:.1%} after GSPO, "
        f"on {len(held_out)} held-out problems, in {outcome.seconds:.0f} s."
    )
    print(f"\n  checkpoint   {outcome.checkpoint}   (Hugging Face format)")
    print(f"  metrics      {root / 'gspo' / 'metrics.jsonl'}, next to samples.jsonl and log.txt")
    print(f"  curves       tensorboard --logdir {root}")
    print(
        "\nNext: train your own model on your own task; see `areno train --help`, and docs/first-run.md for a walkthrough."
    )
