"""The interface through which trainers, the training loop and the server use the models of a run.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from areno.types import ModelRole, Request, RolloutResult, TrainSequence

if TYPE_CHECKING:
    from areno.engine.engine_config import EngineConfig
    from areno.engine.rollout.load import EngineLoad
    from areno.engine.scoring import Scored, TokenRows
    from areno.engine.train.microbatch import MicroBatching
    from areno.loss_fns.loss_interface import LossFn
    from areno.types.routing import RoutingRecord

T = TypeVar("T")

ACTOR = "actor"
"""Name of the role that generates."""


class Generator(Protocol):
    """Serves generation requests."""

    tokenizer: Any

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens per sequence; None if the model states no limit."""

    @property
    def failed(self) -> bool:
        """Whether the whole engine has failed, so that every later request fails too."""

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests and return one future per request.

        Raises EngineError: the models cannot generate, or a request is invalid.
        """

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Abort one request. The request's future then resolves to the tokens sampled before the abort."""

    def load(self) -> EngineLoad:
        """Current generation load, summed over all replicas."""


class Backend(Generator, Protocol):
    """The models of a run.

    :class:`areno.engine.engine.Engine` holds the models in this process. :class:`areno.engine.parallel.group.EngineGroup` holds
    the models in rank processes.
    """

    config: EngineConfig
    eos_ids: frozenset[int]

    @property
    def dp_size(self) -> int:
        """Number of replicas of the models."""

    @property
    def vocab_size(self) -> int:
        """Width of the actor's logits."""

    @property
    def kv_tokens(self) -> int:
        """A replica's KV cache capacity in tokens."""

    def set_max_running(self, sequences: int | None) -> None:
        """Limit the total number of concurrent sequences of all replicas. None restores the configured limit of each
        replica.
        """

    def enable_prefix_cache(self, enabled: bool) -> None:
        """Turn the prefix cache on or off.

        If the configured ``prefix_cache_tokens`` is not 0, do nothing.
        """

    def end_rollout(self) -> None:
        """Abort pending requests. Without ``keep_rollout_state``, also free the KV cache."""

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | MicroBatching,
        accumulation: int | None = None,
        role: str = ACTOR,
    ) -> dict[str, float]:
        """Wait until generation has finished, train a role on rows, and return scalar statistics."""

    def measure(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching, role: str = ACTOR
    ) -> dict[str, float]:
        """Compute loss and statistics of a trainable role without updating it."""

    def score(
        self,
        what: Scored,
        role: str,
        rows: TokenRows,
        micro_bs: int,
        temperatures: float | Sequence[float] = 1.0,
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[Any]:
        """Wait until generation has finished, then score rows with a role; see :func:`areno.engine.scoring.score`."""

    def score_logprobs(
        self,
        role: str,
        rows: TokenRows,
        temperatures: float | Sequence[float] = 1.0,
        micro_bs: int = 8,
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[list[float]]:
        """Per row, the log-prob of each token given the previous tokens. Entry 0 is 0.0.

        ``routed`` contains the recorded expert choices of each row (:mod:`areno.types.routing`). Pass ``routed`` only for the
        actor.
        """
        return self.score("logprobs", role, rows, micro_bs, temperatures, routed)

    def score_values(self, role: str, rows: TokenRows, micro_bs: int = 8) -> list[list[float]]:
        """Per row, the critic's value after each token."""
        return self.score("values", role, rows, micro_bs)

    def score_rewards(self, role: str, rows: TokenRows, micro_bs: int = 8) -> list[float]:
        """Per row, the score at the last token."""
        return self.score("rewards", role, rows, micro_bs)

    def ensure_roles(self, roles: Mapping[str, ModelRole], checkpoint: Path | None = None) -> None:
        """Load the roles that are not loaded yet.

        If ``checkpoint`` contains a trainable role, the role is loaded from ``checkpoint``. With ``checkpoint``, call
        :meth:`load_state` of this checkpoint before training.

        Raises EngineError: a loaded role of the same name has a different checkpoint, kind or ``trainable`` setting. Raises
        UsageError: a role cannot use its checkpoint.
        """

    def drop_role(self, name: str) -> None:
        """Unload a role other than the actor. Raises EngineError: the role does not exist, or is the actor."""

    def learning_rate(self, role: str) -> float:
        """Learning rate of a role's next optimizer step."""

    def set_learning_rate(self, role: str, value: float) -> None:
        """Replace a role's schedule with a constant learning rate."""

    def checkpoint_bytes(self) -> int:
        """Approximate size in bytes of a checkpoint with the state of all trainable roles."""

    def save_model(self, folder: Path, role: str = ACTOR) -> None:
        """Write a role's weights, configuration and tokenizer in Hugging Face format."""

    def save_state(self, checkpoint: Path) -> None:
        """Write all optimizer states, and the trainable models other than the actor."""

    def load_state(self, checkpoint: Path) -> None:
        """Restore a checkpoint's state. The actor must already have loaded the checkpoint's weights.

        Raises CheckpointError: the state is missing, corrupt, or belongs to different parameters.
        """

    def run_on_all_ranks(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Call ``function(engine, *arguments)`` on every rank, and return the results in rank order.

        If all ranks raise the same type of error, this method raises an error of this type. If only some ranks raise an error,
        or if the types differ, this method raises EngineError.
        """

    def close(self) -> None:
        """Stop generation, free the KV cache, and stop all rank processes."""
