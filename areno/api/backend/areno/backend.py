"""The local backend: one engine in this process, with honest step times."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from areno.api.backend.base import ArenoConfig, Backend
from areno.engine.engine import Engine, EngineConfig
from areno.engine.train.optimizer import OptimizerConfig
from areno.errors import EngineError, UsageError
from areno.loss_fns.pack import LossFn
from areno.observability import lifecycle
from areno.types import Request, RolloutResult, TrainSequence

logger = logging.getLogger("areno.api.backend.areno.backend")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RUNTIME = {
    "attn_backend",
    "activation_checkpointing",
    "keep_rollout_state",
    "eager_decode",
    "kv_cache_tokens",
    "device",
    "dtype",
    "trust_remote_code",
}


class ArenoBackend(Backend):
    """Runs :class:`areno.engine.engine.Engine` for a trainer.

    Args:
        model_path: checkpoint folder or hub id, unless the configuration names another.
        world_size: number of ranks; one for now.
        config: the engine's configuration.

    Raises:
        UsageError: a configuration key is unknown, or more ranks are asked for than this version runs.
    """

    def __init__(self, model_path: str, world_size: int, config: ArenoConfig) -> None:
        ranks = (config.dp_size or 1) * config.tp_size
        if world_size != 1 or ranks != 1:
            raise UsageError(
                f"world_size={world_size}, tp_size={config.tp_size}: this version runs one rank; use world_size=1, tp_size=1"
            )
        self._path = config.model_path or model_path
        self._config = _engine_config(config)
        self._engine: Engine | None = None
        self._rollout_s = 0.0
        self._rollout_began: float | None = None
        self._step_began: float | None = None

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            EngineError: it is not initialized, or closed.
        """
        if self._engine is None:
            raise EngineError("the trainer is not initialized: call trainer.init() first, and not after close()")
        return self._engine

    def initialize(self) -> None:
        """Load tokenizer and model.

        Raises:
            EngineError: they are loaded already.
        """
        if self._engine is not None:
            raise EngineError(
                "the trainer is initialized already; loading the model again would drop what it has learned. "
                "Call close() first, or make a new Trainer"
            )
        self._engine = Engine(self._path, self._config)

    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a response."""
        return self.engine.eos_ids

    def context_length(self) -> int | None:
        """Positions that the model was made for."""
        return self.engine.model.context_length

    def compute_dtype(self) -> str:
        """What the model computes in."""
        return str(self._config.dtype).removeprefix("torch.")

    def begin_rollout(self, max_running: int | None = None) -> None:
        """Start the rollout clock; ``max_running`` bounds the sequences decoded at once."""
        now = time.perf_counter()
        self._rollout_began = now
        self._step_began = self._step_began or now
        self.engine.loop.scheduler.max_running = max_running or self._config.max_running

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; one future each."""
        return self.engine.submit(requests)

    def end_rollout(self) -> None:
        """Abort what is pending, stop the rollout clock, and drop the cache unless it is kept."""
        self.engine.end_rollout()
        if self._rollout_began is not None:
            self._rollout_s += time.perf_counter() - self._rollout_began
            self._rollout_began = None

    def train(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int, accumulation: int | None
    ) -> dict[str, float]:
        """Train on rows, and close the step: its times are added to the statistics and logged."""
        began = time.perf_counter()
        stats = self.engine.train(rows, loss_fn, mini_bs, accumulation)
        ended = time.perf_counter()
        rollout, train, total = self._rollout_s, ended - began, ended - (self._step_began or began)
        self._rollout_s, self._step_began = 0.0, None
        lifecycle.backend_time(logger, rollout, train, total)
        times = {"step_rollout_time_s": rollout, "step_train_time_s": train, "step_e2e_time_s": total}
        return {**stats, **times, "policy_train_wall_time_s": train}

    def save_model(self, path: Path) -> None:
        """Write a Hugging Face checkpoint."""
        self.engine.save_model(path)

    def save_state(self, checkpoint: Path) -> None:
        """Write the optimizer's state."""
        self.engine.save_optimizer(checkpoint)

    def load_state(self, checkpoint: Path) -> None:
        """Continue with a saved optimizer."""
        self.engine.load_optimizer(checkpoint)

    def checkpoint_bytes(self) -> int:
        """About how many bytes a checkpoint with state takes."""
        return self.engine.checkpoint_bytes()

    def close(self) -> None:
        """Stop the engine; a second call does nothing."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _engine_config(config: ArenoConfig) -> EngineConfig:
    runtime, optimizer = dict(config.runtime or {}), dict(config.optimizer or {})
    _refuse_unknown("runtime", runtime, _RUNTIME)
    _refuse_unknown("optimizer", optimizer, {f.name for f in dataclasses.fields(OptimizerConfig)})
    device = _device(runtime.pop("device", "auto"), config.devices)
    dtype = _dtype(runtime.pop("dtype", "auto"), device)
    return EngineConfig(
        device=device,
        dtype=dtype,
        optimizer=OptimizerConfig(**optimizer),
        max_running=config.max_running_prompts,
        dummy_load=config.dummy_load,
        decode_progress_interval_s=config.decode_progress_interval_s,
        **runtime,
    )


def _refuse_unknown(section: str, given: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise UsageError(
            f"ArenoConfig.{section} has no key {', '.join(unknown)}; known keys: {', '.join(sorted(known))}"
        )


def _device(name: str, devices: list[int] | None) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        name = f"cuda:{devices[0] if devices else 0}" if available else "cpu"
    if name.startswith("cuda") and not available:
        raise UsageError(
            f"--device {name}: PyTorch sees no GPU here; use --device cpu, or run `areno check` for the reason"
        )
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise UsageError(f"--dtype {name}: use one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
