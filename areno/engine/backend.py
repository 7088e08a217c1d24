"""What trainers, the training loop and the server need of whatever holds the models. Importing this module loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from areno.types import ModelRole, Request, RolloutResult, TrainSequence

if TYPE_CHECKING:
    from areno.engine.engine_config import EngineConfig
    from areno.engine.rollout.load import EngineLoad
    from areno.engine.train.microbatch import MicroBatching
    from areno.loss_fns.pack import LossFn
    from areno.types.routing import RoutingRecord

T = TypeVar("T")

ACTOR = "actor"
"""Name of the role that generates."""


class Generator(Protocol):
    """What answers requests."""

    tokenizer: Any

    @property
    def context_length(self) -> int | None:
        """Most tokens of one sequence, where the model states a limit."""

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; one future each.

        Raises EngineError: the models cannot generate, or a request cannot be answered.
        """

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Answer one request with what it has so far."""

    def load(self) -> EngineLoad:
        """What generation is busy with, over all replicas."""


class Backend(Generator, Protocol):
    """The models of a run: :class:`areno.engine.engine.Engine` has them in this process,
    :class:`areno.engine.parallel.group.EngineGroup` on ranks of their own.
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
        """Tokens that a replica's cache holds."""

    def set_max_running(self, sequences: int | None) -> None:
        """Decode no more sequences at once, on all replicas together; None is what was configured, for each."""

    def enable_prefix_cache(self, wanted: bool) -> None:
        """Keep finished contexts for requests that begin like them, also where none are by configuration; or stop it."""

    def end_rollout(self) -> None:
        """Abort what is pending, and drop the cache unless it is to be kept."""

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | MicroBatching,
        accumulation: int | None = None,
        role: str = ACTOR,
    ) -> dict[str, float]:
        """Train a role on rows, once running generation has ended; returns scalar statistics."""

    def measure(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching, role: str = ACTOR
    ) -> dict[str, float]:
        """Loss and statistics of a role that is trained, without training."""

    def score_logprobs(
        self,
        role: str,
        rows: Sequence[Sequence[int]],
        temperatures: float | Sequence[float] = 1.0,
        micro_bs: int = 8,
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[list[float]]:
        """Log-prob of each token of each row given the tokens before it; entry 0 is 0.0.

        ``routed`` has for each row the experts that its tokens go to, see :mod:`areno.types.routing`; only of the actor.
        """

    def score_values(self, role: str, rows: Sequence[Sequence[int]], micro_bs: int = 8) -> list[list[float]]:
        """Value after each token of each row."""

    def score_rewards(self, role: str, rows: Sequence[Sequence[int]], micro_bs: int = 8) -> list[float]:
        """Score of each row at its last token."""

    def ensure_roles(self, roles: Mapping[str, ModelRole]) -> None:
        """Load the roles that are not there yet.

        EngineError: one of that name is made from something else. UsageError: a checkpoint cannot serve as its role.
        """

    def drop_role(self, name: str) -> None:
        """Free an auxiliary role. Raises EngineError: there is no such role, or it is the actor."""

    def learning_rate(self, role: str) -> float:
        """Rate of a role's next optimizer step."""

    def set_learning_rate(self, role: str, value: float) -> None:
        """Replace a role's schedule by a constant rate."""

    def checkpoint_bytes(self) -> int:
        """About how many bytes a checkpoint with the state of everything that is trained takes."""

    def save_model(self, folder: Path, role: str = ACTOR) -> None:
        """Write a role's weights, configuration and tokenizer in Hugging Face format."""

    def save_state(self, checkpoint: Path) -> None:
        """Write what a resume needs beside the actor: optimizers, and the models of further trained roles."""

    def load_state(self, checkpoint: Path) -> None:
        """Continue with the state of a checkpoint whose weights the actor has loaded.

        CheckpointError: the state is missing, damaged, or made for other parameters.
        """

    def each_rank(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Call a function with the engine of each rank, and further arguments; returns what each has returned.

        Raises EngineError: a rank failed alone; BaseException: what the function raised on all ranks.
        """

    def close(self) -> None:
        """Release everything."""
