"""What a backend is, and how one is chosen. Importing this module loads no engine."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.types import ModelRole, Request, RolloutResult, TrainSequence

if TYPE_CHECKING:
    from areno.loss_fns.pack import LossFn


@dataclass(slots=True)
class ArenoConfig:
    """Configuration of the local engine.

    Args:
        model_path: checkpoint to load instead of the trainer's.
        tp_size: tensor-parallel size.
        dp_size: data-parallel size; None is ``world_size // tp_size``.
        devices: device ids of the ranks.
        dummy_load: random weights instead of the checkpoint's.
        optimizer: fields of :class:`areno.engine.train.optimizer.OptimizerConfig`.
        runtime: ``attn_backend``, ``activation_checkpointing``, ``tree_training``, ``offload_activations``,
            ``keep_rollout_state``, ``eager_decode``, ``speculate``, ``kv_cache_tokens``, ``prefix_cache_tokens``, ``device``,
            ``dtype``, ``trust_remote_code``, ``trains`` (``policy``, ``reward`` to train a sequence classifier, ``nothing`` to
            generate only), and ``stall_timeout_s`` (seconds without progress after which a rank of several has failed; 600).
        max_running_prompts: most sequences decoded at once.
        decode_progress_interval_s: seconds between decode progress lines; 0 writes none.
        lora: train an adapter in place of the weights: fields of :class:`areno.engine.model.adapter.AdapterOptions`, which
            are ``rank`` (or ``adapter_path``), ``alpha``, ``dropout``, ``target_modules``, ``load_in_4bit`` and ``seed``.
            With dropout, the log-probs of a rollout are not those of a training pass: leave it at 0 where importance
            ratios are taken. ``save_checkpoint`` then writes a PEFT adapter. A frozen policy role of the trainer's own
            checkpoint, such as a reference, is the model with the adapter off, and takes no memory.
        fsdp: spread weights and gradients over the replicas (FSDP2), not the optimizer's state alone.
    """

    model_path: str | None = None
    tp_size: int = 1
    dp_size: int | None = None
    devices: list[int] | None = None
    dummy_load: bool = False
    optimizer: dict[str, Any] | None = field(default=None)
    runtime: dict[str, Any] | None = field(default=None)
    max_running_prompts: int = 64
    decode_progress_interval_s: float = 10.0
    lora: dict[str, Any] | None = field(default=None)
    fsdp: bool = False


class Backend(ABC):
    """The operations that :class:`areno.Trainer` needs of whatever holds the model."""

    @abstractmethod
    def initialize(self) -> None:
        """Load the model. Called once, before anything else."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's tokenizer."""

    @abstractmethod
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a response."""

    @abstractmethod
    def dp_size(self) -> int:
        """Number of model replicas."""

    @abstractmethod
    def context_length(self) -> int | None:
        """Most tokens of one sequence, where the model states a limit."""

    def vocabulary_size(self) -> int | None:
        """Number of token ids that the model knows; None where the backend cannot say."""
        return None

    @abstractmethod
    def compute_dtype(self) -> str:
        """``float32`` or ``bfloat16``: what the model computes in."""

    @abstractmethod
    def begin_rollout(self, max_running: int | None = None) -> None:
        """Prepare for generation."""

    @abstractmethod
    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; one future each."""

    @abstractmethod
    def end_rollout(self) -> None:
        """Abort what is pending and make room for training."""

    @abstractmethod
    def train(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int, accumulation: int | None
    ) -> dict[str, float]:
        """Train on rows; returns scalar statistics with ``step_rollout_time_s``, ``step_train_time_s``, ``step_e2e_time_s``."""

    @abstractmethod
    def train_role(
        self, role: str, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int, accumulation: int | None
    ) -> dict[str, float]:
        """Train an auxiliary role; its statistics, without step times, because the step goes on."""

    @abstractmethod
    def finish_step(self) -> dict[str, float]:
        """Close a step that trained no actor; its times."""

    @abstractmethod
    def ensure_roles(self, roles: Mapping[str, ModelRole]) -> None:
        """Load auxiliary roles that are not there yet."""

    @abstractmethod
    def drop_role(self, role: str) -> None:
        """Free an auxiliary role."""

    @abstractmethod
    def score_logprobs(
        self, role: str, rows: Sequence[Sequence[int]], temperatures: float | Sequence[float], micro_bs: int
    ) -> list[list[float]]:
        """Log-prob of each token of each row; entry 0 is 0.0."""

    @abstractmethod
    def score_values(self, role: str, rows: Sequence[Sequence[int]], micro_bs: int) -> list[list[float]]:
        """Value after each token of each row."""

    @abstractmethod
    def score_rewards(self, role: str, rows: Sequence[Sequence[int]], micro_bs: int) -> list[float]:
        """Score of each row."""

    @abstractmethod
    def learning_rate(self, role: str) -> float:
        """Rate of a role's next optimizer step."""

    @abstractmethod
    def set_learning_rate(self, role: str, value: float) -> None:
        """Replace a role's schedule by a constant rate."""

    @abstractmethod
    def save_model(self, path: Path) -> None:
        """Write the actor as a Hugging Face checkpoint."""

    @abstractmethod
    def save_state(self, checkpoint: Path) -> None:
        """Write optimizers and further trained roles into a checkpoint folder."""

    @abstractmethod
    def load_state(self, checkpoint: Path) -> None:
        """Continue with the optimizers and trained roles of a checkpoint folder."""

    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """About how many bytes a checkpoint with state takes."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class BackendType:
    """A selectable backend.

    Args:
        name: for messages.
        config_type: class of its configuration.
        factory: ``module:attribute`` of a callable ``(model_path, world_size, config) -> Backend``; imported on use.
    """

    name: str
    config_type: type
    factory: str

    def create(self, model_path: str, world_size: int, config: Any) -> Backend:
        """Build the backend; nothing is loaded yet.

        Raises:
            TypeError: the configuration is of another class.
        """
        if not isinstance(config, self.config_type):
            raise TypeError(
                f"backend {self.name} requires its typed configuration {self.config_type.__name__}, "
                f"got {type(config).__name__}"
            )
        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)(model_path, world_size, config)


Areno = BackendType("areno", ArenoConfig, "areno.api.backend.areno.backend:ArenoBackend")
_REGISTRY: dict[str, BackendType] = {Areno.name: Areno}


def register_backend(backend: BackendType) -> BackendType:
    """Make a backend selectable by name.

    Raises:
        ValueError: the name is taken by another backend.
    """
    known = _REGISTRY.setdefault(backend.name.lower(), backend)
    if known != backend:
        raise ValueError(f"a backend named {backend.name!r} is registered already: {known.factory}")
    return backend


def get_backend(name: str) -> BackendType:
    """Look a backend up.

    Raises:
        ValueError: no such backend; the message lists what there is.
    """
    if name.lower() not in _REGISTRY:
        raise ValueError(f"unknown backend {name!r}; registered: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name.lower()]
