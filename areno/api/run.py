"""A whole run from resolved options: data, model, trainer, summary. ``areno train`` and the quickstart both come here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from areno.api.backend.base import ArenoConfig
from areno.api.datasets import load_training_dataset
from areno.api.trainer import Trainer
from areno.api.trainers.loop import TrainingLoop
from areno.api.trainers.stopping import StopRequested
from areno.config.algorithms import get_algorithm
from areno.config.train_options import TrainOptions
from areno.engine.checkpoint.folder import CheckpointFolder
from areno.observability.display import Progress
from areno.observability.logs import setup_logging
from areno.observability.run_dir import RunDirectory

logger = logging.getLogger(__name__)


def run_training(
    options: TrainOptions,
    *,
    reward_fn: Callable[..., Any] | None = None,
    loader_fn: Callable[..., Any] | None = None,
    progress: Progress | None = None,
    console_level: str | None = None,
) -> int:
    """Train as the options say.

    Args:
        options: validated and resolved options.
        reward_fn: loaded reward function; where ``options.reward_fn_path`` is set it runs from that file in workers.
        loader_fn: loaded data set loader.
        progress: shows the run; None suits the terminal or pipe.
        console_level: least level of console log lines; None reads ``ARENO_LOG_LEVEL``. ``log.txt`` has them all.

    Returns:
        Exit code: 0, or 128 plus the signal that stopped the run.

    Raises:
        ArenoError: the run cannot go on; what was complete is saved.
    """
    run_dir = RunDirectory(options.run_path).create()
    with setup_logging(run_dir, level=console_level):
        began = time.perf_counter()
        dataset = load_training_dataset(str(options.dataset_path), loader_fn)
        trainer = _trainer(options)
        try:
            trainer.init()
            loop = _loop(options, trainer, dataset, reward_fn)
            if progress is not None:
                loop.display = progress
            return _fit(options, loop, run_dir, began)
        finally:
            trainer.close()


def _loop(options: TrainOptions, trainer: Trainer, dataset: Any, reward_fn: Any) -> TrainingLoop:
    spec = get_algorithm(options.algo)
    return spec.resolve_trainer_cls()(
        options, instance=trainer, dataset=dataset, reward_fn=reward_fn, loss_fn=spec.make_loss_fn(options)
    )


def _fit(options: TrainOptions, loop: TrainingLoop, run_dir: RunDirectory, began: float) -> int:
    with loop.stop.signals():
        try:
            state = loop.fit()
        except StopRequested as stop:
            logger.warning("run stopped; continue it with: areno train --resume %s", run_dir.path)
            return 128 + stop.signum
    latest = loop.checkpoints.latest()
    run_dir.write_summary(
        {
            "algo": options.algo,
            "steps": state.step,
            "epochs": state.epoch,
            "seed": options.seed,
            "seconds": round(time.perf_counter() - began, 3),
            "checkpoint": str(latest) if latest else None,
            "last": (run_dir.read_metrics() or [{}])[-1],
        }
    )
    logger.info("run finished: steps=%d checkpoint=%s metrics=%s", state.step, latest, run_dir.metrics_path)
    return 0


def _trainer(options: TrainOptions) -> Trainer:
    """The SDK trainer that the options describe; a resumed run loads its newest checkpoint instead of ``--ckpt``."""
    latest = CheckpointFolder(options.checkpoint_path).latest() if options.resume else None
    config = ArenoConfig(
        tp_size=options.tp_size,
        max_running_prompts=options.running_sequences,
        optimizer={
            "lr": options.lr,
            "min_lr": options.min_lr,
            "lr_decay_steps": options.lr_decay_steps,
            "lr_decay_style": options.lr_decay_style,
            "lr_warmup_steps": options.lr_warmup_steps,
            "betas": (options.adam_beta1, options.adam_beta2),
            "eps": options.adam_eps,
            "weight_decay": options.weight_decay,
            "grad_clip_norm": options.grad_clip_norm,
        },
        runtime={
            "device": options.device,
            "dtype": options.dtype,
            "attn_backend": options.attn_backend,
            "activation_checkpointing": options.activation_checkpointing,
            "keep_rollout_state": not options.drop_rollout_state,
            "eager_decode": options.eager_decode,
            "kv_cache_tokens": options.kv_cache_tokens,
            "trust_remote_code": options.trust_remote_code,
        },
    )
    trainer = Trainer(options.world_size, str(latest or options.ckpt), custom_config=config)
    trainer.seed = options.seed
    return trainer
