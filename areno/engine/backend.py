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
"""Role name of a run's main model: the policy, or the reward model if the run trains one (``--algo rm``)."""


class Generator(Protocol):
    """Accepts generation requests, and returns their results as futures."""

    tokenizer: Any

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens per sequence; None if the model's configuration states no limit."""

    @property
    def failed(self) -> bool:
        """Whether the engine has failed. After a failure of the engine, every request fails."""

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests, and return one future per request.

        Raises EngineError: the models cannot generate, or a request is invalid.
        """

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Abort the request of ``future``. The future's result then contains the tokens sampled before the abort."""

    def load(self) -> EngineLoad:
        """Return the current load, summed over the replicas."""


class Backend(Generator, Protocol):
    """The interface to the models of a run.

    :class:`areno.engine.engine.Engine` holds the models in this process. :class:`areno.engine.parallel.group.EngineGroup` holds
    the models in separate processes, one per rank.
    """

    config: EngineConfig
    eos_ids: frozenset[int]

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas of the models."""

    @property
    def vocab_size(self) -> int:
        """Number of logits that the actor computes per token."""

    @property
    def kv_tokens(self) -> int:
        """Capacity of each replica's KV cache in tokens."""

    def set_max_running(self, sequences: int | None) -> None:
        """Limit the number of sequences that all replicas together generate at once. None means the configured limits."""

    def enable_prefix_cache(self, enabled: bool) -> None:
        """Turn the prefix cache on or off.

        If the setting ``prefix_cache_tokens`` is 0 (the default), the prefix cache is off until this method turns it on. With
        any other value, the prefix cache is always on, and this method does nothing.
        """

    def end_rollout(self) -> None:
        """Abort unfinished requests, and free the KV cache unless ``config.keep_rollout_state`` is true."""

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | MicroBatching,
        accumulation: int | None = None,
        role: str = ACTOR,
    ) -> dict[str, float]:
        """Wait until generation has finished, train a role on rows, and return the training statistics by name."""

    def measure(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching, role: str = ACTOR
    ) -> dict[str, float]:
        """Compute the loss and the statistics of a trainable role on rows, without an optimizer step."""

    def score(
        self,
        what: Scored,
        role: str,
        rows: TokenRows,
        micro_bs: int,
        temperatures: float | Sequence[float] = 1.0,
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[Any]:
        """Wait until generation has finished, then score rows with a role's model; see :func:`areno.engine.scoring.score`."""

    def score_logprobs(
        self,
        role: str,
        rows: TokenRows,
        temperatures: float | Sequence[float] = 1.0,
        micro_bs: int = 8,
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[list[float]]:
        """Return, for each row, the log-prob of each token given the previous tokens. The first token's entry is 0.0.

        ``routed`` contains the experts recorded for each row's tokens (:mod:`areno.types.routing`). Pass ``routed`` only for
        the actor.
        """
        return self.score("logprobs", role, rows, micro_bs, temperatures, routed)

    def score_values(self, role: str, rows: TokenRows, micro_bs: int = 8) -> list[list[float]]:
        """Return, for each row, the critic's value after each token."""
        return self.score("values", role, rows, micro_bs)

    def score_rewards(self, role: str, rows: TokenRows, micro_bs: int = 8) -> list[float]:
        """Return, for each row, the reward model's score at the last token."""
        return self.score("rewards", role, rows, micro_bs)

    def ensure_roles(self, roles: Mapping[str, ModelRole], checkpoint: Path | None = None) -> None:
        """Load the roles that are not loaded yet.

        A trainable role that ``checkpoint`` contains is loaded from ``checkpoint``. If you pass ``checkpoint``, call
        :meth:`load_state` with the same folder before you train.

        Raises EngineError: a loaded role of the same name has a different checkpoint, kind or ``trainable`` setting. Raises
        UsageError: the checkpoint of a role cannot be loaded, or has a different tokenizer than the actor.
        """

    def drop_role(self, name: str) -> None:
        """Unload a role other than the actor. Raises EngineError: no role has this name, or the role is the actor."""

    def learning_rate(self, role: str) -> float:
        """Return the learning rate of a role's next optimizer step."""

    def set_learning_rate(self, role: str, value: float) -> None:
        """Replace a role's learning-rate schedule with a constant learning rate."""

    def checkpoint_bytes(self) -> int:
        """Return the approximate size in bytes of a checkpoint that contains the state of all trainable roles."""

    def save_model(self, folder: Path, role: str = ACTOR) -> None:
        """Write a role's weights, configuration and tokenizer in Hugging Face format."""

    def save_state(self, checkpoint: Path) -> None:
        """Write the optimizer states of all trainable roles, and the models of all trainable roles other than the actor."""

    def load_state(self, checkpoint: Path) -> None:
        """Restore the state that :meth:`save_state` wrote. The actor's weights must already be those of the checkpoint.

        Raises CheckpointError: the state is missing or corrupt, or its parameters differ from those of the loaded models.
        """

    def run_on_all_ranks(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Call ``function(engine, *arguments)`` on every rank, and return the results in rank order.

        If all ranks raise errors of the same type, this method raises an error of that type. If only some ranks raise errors,
        or if the types differ, this method raises EngineError.
        """

    def close(self) -> None:
        """Stop generation, free the KV cache, and stop all rank processes."""
