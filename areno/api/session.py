"""The rollout session: the boundary inside which generation is allowed."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from areno.types import SamplingParams

if TYPE_CHECKING:
    from areno.api.trainer import Trainer


class RolloutSession:
    """Context manager, sync or async; made by :meth:`areno.Trainer.rollout_session`.

    Sessions nest: the outermost one prepares the backend and ends the rollout.
    """

    def __init__(self, trainer: Trainer, sampling_params: SamplingParams, max_running_prompts: int | None) -> None:
        self.trainer = trainer
        self.sampling_params = sampling_params
        self.max_running_prompts = max_running_prompts

    def __enter__(self) -> RolloutSession:
        self.trainer.begin_rollout_session(self.max_running_prompts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.trainer.end_rollout_session()

    async def __aenter__(self) -> RolloutSession:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)
