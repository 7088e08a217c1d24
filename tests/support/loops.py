"""A training loop whose steps a test runs one by one, in this process, with a tiny real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from areno import ArenoConfig, Trainer
from areno.api.trainers.rollout_trainer import RolloutTrainer
from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions

ROWS = [{"prompt": f"What is {a} plus {b}?"} for a in range(10) for b in range(10)]
# Every response ends at EOS or at the limit; updates are large enough to be noticed.
SIZES: dict[str, Any] = {"batch_size": 4, "n_samples": 3, "max_new_tokens": 8, "mini_bs": 64, "lr": 1e-2}


def share_of_even_digits(record: Any) -> float:
    """Dense enough that a random model gets different rewards."""
    return sum(c in "02468" for c in record.completion) / (1 + len(record.completion))


def open_trainer(checkpoint: Path, lr: float = SIZES["lr"]) -> Trainer:
    """The trainer of a loop: constant learning rate, no weight decay, no clipping."""
    trainer = Trainer(1, str(checkpoint), custom_config=ArenoConfig(optimizer={"lr": lr}))
    trainer.init()
    return trainer


@contextmanager
def open_loop(
    algo: str,
    checkpoint: Path,
    run_dir: Path,
    *,
    reward: Callable[..., float] | None = share_of_even_digits,
    rows: list[dict[str, Any]] = ROWS,
    **options: Any,
) -> Iterator[RolloutTrainer]:
    """A loop that is ready for ``step``; options are those of ``areno train``."""
    chosen = TrainOptions(
        algo=algo, ckpt=str(checkpoint), dataset_path="rows", run_dir=str(run_dir), **{**SIZES, **options}
    )
    spec = get_algorithm(algo)
    with open_trainer(checkpoint, chosen.lr) as trainer:
        loop = spec.resolve_trainer_cls()(
            chosen, instance=trainer, dataset=rows, reward_fn=reward, loss_fn=spec.make_loss_fn(chosen)
        )
        loop.run_dir.create()
        try:
            loop.load_models()
            loop.prepare()
            yield loop
        finally:
            loop.cleanup()


def step(loop: RolloutTrainer) -> Any:
    """Run the next step and complete it, as the loop does; returns its outcome."""
    size = loop.config.batch_size
    batch, _ = next(loop.batches(range(len(loop.dataset)), loop.state.step * size))
    outcome = loop.run_step(batch)
    loop.state.step += 1
    loop._updating = False
    return outcome


def weights_of(trainer: Trainer, role: str = "actor") -> dict[str, torch.Tensor]:
    """A copy of a role's weights."""
    return {name: value.clone() for name, value in trainer.backend.role(role).model.module.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether weights are bit-equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_classifier(folder: Path, base: Path, head: float | None = None) -> Path:
    """Write a sequence classifier with one output on the body of ``base``; random head weights unless ``head`` is given."""
    torch.manual_seed(0)
    module = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    with torch.no_grad():
        module.score.weight.normal_() if head is None else module.score.weight.fill_(head)
    module.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder
