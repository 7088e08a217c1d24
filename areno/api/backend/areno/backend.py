"""The local backend: one engine in this process, with honest step times."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from areno.api.backend.base import ArenoConfig, Backend
from areno.api.backend.checks import check_config
from areno.config.machine import gpu_problem
from areno.engine.device import rank_devices
from areno.engine.engine import ACTOR, Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.model.adapter import AdapterOptions
from areno.engine.native import release_workers
from areno.engine.parallel.group import AnyEngine, EngineGroup
from areno.engine.parallel.peers import Layout
from areno.engine.parallel.workers import STALL_S
from areno.engine.train.optimizer import OptimizerConfig
from areno.errors import EngineError, UsageError
from areno.loss_fns.pack import LossFn
from areno.observability import lifecycle
from areno.types import ModelRole, Request, RolloutResult, TrainSequence

logger = logging.getLogger("areno.api.backend.areno.backend")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ArenoBackend(Backend):
    """Runs :class:`areno.engine.engine.Engine` for a trainer.

    Args:
        model_path: checkpoint folder or hub id, unless the configuration names another.
        world_size: number of ranks; more than one are processes of their own.
        config: the engine's configuration.

    Raises:
        UsageError: a configuration key or value is wrong, or the sizes and devices do not fit each other.
    """

    def __init__(self, model_path: str, world_size: int, config: ArenoConfig) -> None:
        check_config(config)
        self._path = config.model_path or model_path
        self._layout = Layout.of(world_size, config.tp_size, config.dp_size, config.fsdp)
        self._stall_s = float((config.runtime or {}).get("stall_timeout_s", STALL_S))
        self._config = _engine_config(config)
        self._devices = rank_devices(self._config.device, world_size, torch.cuda.device_count(), config.devices)
        self._engine: AnyEngine | None = None
        self._rollout_s = self._train_s = 0.0
        self._rollout_began: float | None = None
        self._step_began: float | None = None

    @property
    def engine(self) -> AnyEngine:
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
        if self._layout.world_size == 1:
            self._engine = Engine(self._path, self._config)
        else:
            self._engine = EngineGroup(self._path, self._config, self._layout, self._devices, self._stall_s)

    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a response."""
        return self.engine.eos_ids

    def dp_size(self) -> int:
        """Replicas of the model."""
        return self._layout.dp_size

    def context_length(self) -> int | None:
        """Positions that the model was made for."""
        return self.engine.context_length

    def vocabulary_size(self) -> int | None:
        """Rows of the embedding table."""
        return self.engine.vocab_size

    def compute_dtype(self) -> str:
        """What the model computes in."""
        return str(self._config.dtype).removeprefix("torch.")

    def begin_rollout(self, max_running: int | None = None) -> None:
        """Start the rollout clock; ``max_running`` bounds the sequences decoded at once."""
        release_workers()  # an agent may ask from other threads while this one waits
        now = time.perf_counter()
        self._rollout_began = now
        self._step_began = self._step_began or now
        self.engine.set_max_running(max_running)

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
        before = self._train_s
        stats, ended = self._timed_train(rows, loss_fn, mini_bs, accumulation, ACTOR)
        policy_s = self._train_s - before
        return {**stats, **self._close_step(ended), "policy_train_wall_time_s": policy_s}

    def finish_step(self) -> dict[str, float]:
        """Close a step that trained no actor: returns its times, of all roles that were trained in it, and logs them."""
        return self._close_step(time.perf_counter())

    def _close_step(self, ended: float) -> dict[str, float]:
        rollout, train, total = self._rollout_s, self._train_s, ended - (self._step_began or ended)
        self._rollout_s, self._train_s, self._step_began = 0.0, 0.0, None
        lifecycle.backend_time(logger, rollout, train, total)
        return {"step_rollout_time_s": rollout, "step_train_time_s": train, "step_e2e_time_s": total}

    def train_role(
        self, role: str, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int, accumulation: int | None
    ) -> dict[str, float]:
        """Train an auxiliary role; the step goes on."""
        return self._timed_train(rows, loss_fn, mini_bs, accumulation, role)[0]

    def _timed_train(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int, accumulation: int | None, role: str
    ) -> tuple[dict[str, float], float]:
        """Statistics, and when training ended."""
        began = time.perf_counter()
        self._step_began = self._step_began or began
        stats = self.engine.train(rows, loss_fn, mini_bs, accumulation, role)
        ended = time.perf_counter()
        self._train_s += ended - began
        return stats, ended

    def ensure_roles(self, roles: Mapping[str, ModelRole]) -> None:
        """Load auxiliary roles that are not there yet."""
        self.engine.ensure_roles(roles)

    def drop_role(self, role: str) -> None:
        """Free an auxiliary role."""
        self.engine.drop_role(role)

    def score_logprobs(
        self, role: str, rows: Sequence[Sequence[int]], temperatures: float | Sequence[float], micro_bs: int
    ) -> list[list[float]]:
        """Log-prob of each token of each row; entry 0 is 0.0."""
        return self.engine.score_logprobs(role, rows, temperatures, micro_bs)

    def score_values(self, role: str, rows: Sequence[Sequence[int]], micro_bs: int) -> list[list[float]]:
        """Value after each token of each row."""
        return self.engine.score_values(role, rows, micro_bs)

    def score_rewards(self, role: str, rows: Sequence[Sequence[int]], micro_bs: int) -> list[float]:
        """Score of each row."""
        return self.engine.score_rewards(role, rows, micro_bs)

    def learning_rate(self, role: str) -> float:
        """Rate of a role's next optimizer step."""
        return self.engine.learning_rate(role)

    def set_learning_rate(self, role: str, value: float) -> None:
        """Replace a role's schedule by a constant rate."""
        self.engine.set_learning_rate(role, value)

    def save_model(self, path: Path) -> None:
        """Write a Hugging Face checkpoint."""
        self.engine.save_model(path)

    def save_state(self, checkpoint: Path) -> None:
        """Write optimizers and further trained roles."""
        self.engine.save_state(checkpoint)

    def load_state(self, checkpoint: Path) -> None:
        """Continue with saved optimizers and trained roles."""
        self.engine.load_state(checkpoint)

    def checkpoint_bytes(self) -> int:
        """About how many bytes a checkpoint with state takes."""
        return self.engine.checkpoint_bytes()

    def close(self) -> None:
        """Stop the engine; a second call does nothing."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _engine_config(config: ArenoConfig) -> EngineConfig:
    runtime = dict(config.runtime or {})
    runtime.pop("stall_timeout_s", None)
    if config.lora is not None and runtime.get("trains") == "nothing":
        raise UsageError("ArenoConfig.lora has no effect where nothing is trained; give an adapter as the model's path")
    device = _device(runtime.pop("device", "auto"), config.devices)
    dtype = _dtype(runtime.pop("dtype", "auto"), device)
    return EngineConfig(
        device=device,
        dtype=dtype,
        optimizer=OptimizerConfig.of(config.optimizer or {}, "ArenoConfig.optimizer"),
        adapter=None if config.lora is None else AdapterOptions.of(config.lora, "ArenoConfig.lora"),
        max_running=config.max_running_prompts,
        dummy_load=config.dummy_load,
        decode_progress_interval_s=config.decode_progress_interval_s,
        decode="eager" if runtime.pop("eager_decode", False) else "auto",
        **runtime,
    )


def _device(name: str, devices: list[int] | None) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        name = f"cuda:{devices[0] if devices else 0}" if available else "cpu"
    if not available and (problem := gpu_problem(name, 1, 0)):
        raise UsageError(problem)
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise UsageError(f"--dtype {name}: use one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
