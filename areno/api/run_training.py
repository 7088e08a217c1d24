"""Runs training or an evaluation from resolved options.

``areno train``, ``areno eval``, ``areno replay`` and the quickstart use this module. An evaluation uses the algorithm's
trainer to generate and reward answers, but runs no training steps.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from areno.api.backend.base import ArenoConfig
from areno.api.datasets import first_rows, load_training_dataset
from areno.api.evaluation import OnScored
from areno.api.trainer import Trainer
from areno.api.trainers.base import DatasetTrainer, optimizer_settings, spec_of
from areno.api.trainers.rollout_trainer import RolloutTrainer
from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.hooks import EVAL_LOADER_HOOK, LOADER_HOOK, load_hook
from areno.config.machine import runtime_of
from areno.config.splits import TEST, TRAIN, row_sources
from areno.config.validate import check_length
from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.errors import DataError, UsageError
from areno.gpus import visible_gpus
from areno.observability.display import ProgressDisplay
from areno.observability.logs import setup_logging
from areno.reports.report import report_at_end
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import is_run
from areno.storage.run_lock import run_lock
from areno.storage.run_status import recorded_status
from areno.training.checkpoints import Checkpoints
from areno.training.objectives.base import Needs, row_problem
from areno.training.stopping import StopRequested

logger = logging.getLogger(__name__)

_RUNTIME = (
    *("device", "dtype", "attn_backend", "tree_training", "offload_activations", "eager_decode", "speculate"),
    *("kv_cache_tokens", "trust_remote_code", "return_routed_experts"),
)
"""Options of ``areno train`` whose names are also keys of ``ArenoConfig.runtime``."""


def run_training(
    options: TrainOptions,
    *,
    loader_fn: Callable[..., Any] | None = None,
    progress: ProgressDisplay | None = None,
    console_level: str | None = None,
) -> int:
    """Run training, and return the exit code: 0, or 128 plus the number of the signal that stopped the run.

    Args:
        options: validated and resolved options.
        loader_fn: function that loads the dataset; None uses the default loader.
        progress: progress display; None selects a display for the terminal or pipe.
        console_level: minimum level of log lines on the console; None uses ``--log-level``. ``log.txt`` has all levels.
    """
    run_dir = RunDirectory(options.run_path).create()
    level = console_level or (None if options.log_level == "auto" else options.log_level)
    with locked_run(options), setup_logging(run_dir, level=level):
        try:
            with report_at_end(run_dir), recorded_status(run_dir):
                _train(options, run_dir, loader_fn, progress)
        except StopRequested as stop:
            logger.warning("the run was stopped; to continue the run, use: areno train --resume %s", run_dir.path)
            return 128 + stop.signum
        return 0


def _train(
    options: TrainOptions,
    run_dir: RunDirectory,
    loader_fn: Callable[..., Any] | None,
    progress: ProgressDisplay | None,
) -> None:
    """Train in a locked run directory; see :func:`run_training`. Raises StopRequested if a signal stopped the run."""
    start = time.perf_counter()
    logger.info(" ".join(f"{name}={value}" for name, value in runtime_of(options, visible_gpus()).items()))
    dataset = load_training_dataset(str(options.dataset_path), loader_fn)
    held_out = load_held_out(options, loader_fn)
    _check_rows(options, dataset, held_out)
    if not options.tune_params:  # tuning may choose another batch size
        check_length(options, len(dataset))
    checkpoint = _checkpoint(options)
    trainer = make_trainer(options, get_algorithm(options.algo).trains, checkpoint)
    try:
        trainer.init()
        if options.tune_params:
            options = _tuned(options, trainer, len(dataset))
            check_length(options, len(dataset))
        torch.manual_seed(options.seed)  # for dropout
        loop = make_loop(options, trainer, dataset)
        loop.eval_rows, loop.resumed_from = held_out, checkpoint
        if progress is not None:
            loop.report.display = progress
        run_loop(options, loop, run_dir, start)
    finally:
        trainer.close()


@contextmanager
def locked_run(options: TrainOptions) -> Iterator[None]:
    """Lock the directories of a run for this process during the ``with`` block."""
    directories = {
        "--run-dir": options.run_path,
        "--save-path": options.checkpoint_path,
        "--metrics-log-dir": options.events_path,
    }
    run, locked = options.run_path.resolve(), set[Path]()
    with ExitStack() as locks:
        for option, directory in directories.items():
            folder = directory.resolve()
            if folder not in locked and run not in folder.parents:
                locks.enter_context(run_lock(directory, f"or choose another {option}"))
                locked.add(folder)
        if options.resume is None and is_run(options.run_path):
            raise UsageError(f"--run-dir {options.run_path} already contains a run; choose another directory")
        yield


def _check_rows(options: TrainOptions, dataset: Sequence[Any], held_out: Sequence[Any] | None) -> None:
    """Raise DataError if the algorithm cannot use the first training row or the first held-out row."""
    algorithm = get_algorithm(options.algo)
    objective = getattr(algorithm.resolve_trainer_cls(), "objective", None)
    needs: Needs | None = "prompt" if algorithm.requires_rollout else getattr(objective, "needs", None)
    for source, rows in ((options.dataset_path, dataset), (options.eval_dataset_path, held_out)):
        if needs is not None and rows is not None and (problem := row_problem(needs, rows[0], str(source))):
            raise DataError(problem)


def _tuned(options: TrainOptions, trainer: Trainer, rows: int) -> TrainOptions:
    from areno.engine.plan.tuner import tune_sizes

    loss_fn = get_algorithm(options.algo).make_loss_fn(options)
    assert loss_fn is not None
    return tune_sizes(trainer.backend, options, loss_fn, rows=rows)


def load_held_out(options: TrainOptions, loader_fn: Callable[..., Any] | None) -> Sequence[Any] | None:
    """Load the held-out rows; None if ``--eval-dataset-path`` is not set.

    The loader is ``--eval-dataset-loader-fn`` or, by default, the loader of the training data. The random state is
    restored after loading, so that a loader does not affect training.
    """
    path, eval_loader = options.eval_dataset_path, options.eval_dataset_loader_fn
    if path is None:
        return None
    if eval_loader is None and _trained_on(options, path, loader_fn is not None):
        logger.warning("--eval-dataset-path shares rows with --dataset-path, so the evaluation uses training rows")
    rng = capture_rng()
    hook = LOADER_HOOK
    if eval_loader is not None:
        hook = EVAL_LOADER_HOOK
        loader_fn = load_hook(eval_loader, hook)
    rows = load_training_dataset(path, loader_fn, option="--eval-dataset-path", loader_option=hook.option, split=TEST)
    rows = first_rows(rows, options.eval_max_rows)
    restore_rng(rng)
    return rows


def _trained_on(options: TrainOptions, held_out: str, has_loader: bool) -> bool:
    trained = str(options.dataset_path)
    if has_loader:
        return held_out == trained
    return bool(row_sources(trained, TRAIN) & row_sources(held_out, TEST))


def run_evaluation(
    options: TrainOptions,
    *,
    loader_fn: Callable[..., Any] | None = None,
    on_start: Callable[[int], None] | None = None,
    on_scored: OnScored | None = None,
) -> dict[str, float]:
    """Evaluate ``options.ckpt`` on ``options.dataset_path``.

    Args:
        options: validated options. ``eval_*`` options set the number of rows, the number of answers per prompt, and
            the temperature.
        loader_fn: function that loads the dataset; None uses the default loader.
        on_start: function that is called once the model is loaded; its argument is the number of rows.
        on_scored: function that is called with the records and rewards of each batch.

    Returns:
        The metrics of :func:`areno.api.evaluation.evaluate_prompts`.
    """
    rows = first_rows(load_training_dataset(str(options.dataset_path), loader_fn, split=TEST), options.eval_max_rows)
    options = replace(options, eval_dataset_path=options.dataset_path)
    with make_trainer(options, trains="nothing") as trainer:
        trainer.init()
        loop = cast(RolloutTrainer, make_loop(options, trainer, rows))
        try:
            loop.load_models()
            loop.prepare()
            if on_start is not None:
                on_start(len(rows))
            return loop.evaluate(rows, on_scored=on_scored)
        finally:
            loop.cleanup()


def make_loop(options: TrainOptions, trainer: Trainer, dataset: Any, kind: type | None = None) -> DatasetTrainer:
    """Create a training loop of the class ``kind``, by default the algorithm's subclass of :class:`DatasetTrainer`."""
    spec = get_algorithm(options.algo)
    loss_fn = spec.make_loss_fn(options)
    make: Callable[..., DatasetTrainer] = kind or spec.resolve_trainer_cls()
    return make(options, instance=trainer, dataset=dataset, reward_fn=None, loss_fn=loss_fn)


def run_loop(options: TrainOptions, loop: DatasetTrainer, run_dir: RunDirectory, start: float) -> None:
    """Run a training loop to the end, and write the summary. ``start`` is the run's start time (``time.perf_counter``)."""
    with loop.stop.signals():
        state = loop.fit()
    latest = loop.checkpointing.folder.latest()
    run_dir.write_summary(
        {
            "algo": options.algo,
            "steps": state.step,
            "epochs": state.epoch,
            "seed": options.seed,
            "seconds": round(time.perf_counter() - start, 3),
            "checkpoint": str(latest) if latest else None,
            "last": _last_step(run_dir),
            **_evaluations(options, loop),
        }
    )
    logger.info("run finished: steps=%d checkpoint=%s metrics=%s", state.step, latest, run_dir.metrics_path)


def _last_step(run_dir: RunDirectory) -> dict[str, Any]:
    records = [record for record in run_dir.read_metrics() if any(name.startswith("train/") for name in record)]
    return records[-1] if records else {}


def _evaluations(options: TrainOptions, loop: DatasetTrainer) -> dict[str, Any]:
    """Log the best evaluation, and return the last and the best evaluation for the summary; {} without evaluations."""
    last, best = loop.state.evaluation, loop.state.best
    if last is None:
        return {}
    summary: dict[str, Any] = {"evaluation": {"step": last["step"], **last["metrics"]}, "best_evaluation": best}
    if best is not None:
        checkpoint = options.ckpt if best["step"] == 0 else loop.checkpointing.folder.find(best["step"])
        summary["best_evaluation"] = {**best, "checkpoint": None if checkpoint is None else str(checkpoint)}
        logger.info(
            "best evaluation: %s=%g after %d steps, checkpoint %s",
            *(best["metric"], best["value"], best["step"], checkpoint or "not kept (use --keep-best)"),
        )
    return summary


def _checkpoint(options: TrainOptions) -> Path | None:
    if not options.resume:
        return None
    return Checkpoints(spec_of(options).checkpoints).find(options.resume_step)


def make_trainer(options: TrainOptions, trains: str, checkpoint: Path | None = None) -> Trainer:
    """Create the SDK trainer. A resumed run without LoRA loads its checkpoint instead of ``--ckpt``."""
    config = ArenoConfig(
        tp_size=options.tp_size,
        fsdp=options.fsdp,
        # Tuning may raise this.
        max_running_prompts=max(options.running_sequences, options.tune_max_samples if options.tune_params else 0),
        optimizer=optimizer_settings(options),
        runtime={
            **{name: getattr(options, name) for name in _RUNTIME},
            "activation_checkpointing": options.recomputes,
            "keep_rollout_state": not options.drop_rollout_state,
            "trains": trains,
            "stall_timeout_s": options.stall_timeout,
        },
        lora=_lora(options, checkpoint),
    )
    path = options.ckpt if options.uses_lora else checkpoint or options.ckpt
    trainer = Trainer(options.world_size, str(path), custom_config=config)
    trainer.seed = options.seed
    return trainer


def _lora(options: TrainOptions, checkpoint: Path | None) -> dict[str, Any] | None:
    if not options.uses_lora:
        return None
    adapter = str(checkpoint) if checkpoint is not None else options.lora_adapter_path
    return {
        **{name: getattr(options, f"lora_{name}") for name in ("rank", "alpha", "dropout", "target_modules")},
        "adapter_path": adapter,
        "load_in_4bit": options.load_in_4bit,
        "seed": options.seed,
    }
