"""Creates the reward runner of a training or evaluation run from the options of the run."""

from collections.abc import Callable
from typing import Any, cast

from areno.config.all_train_options import TrainOptions
from areno.rewards import RewardRunner
from areno.rewards.runner import OnError
from areno.types import RewardParts


def reward_runner(options: TrainOptions, reward_fn: Callable[..., Any] | None = None) -> RewardRunner:
    """Create a reward runner without starting its workers. Set either ``reward_fn`` or ``--reward-fn-path``, not both."""
    return RewardRunner(
        reward_fn,
        path=options.reward_fn_path,
        timeout_s=options.reward_timeout_s,
        workers=options.reward_workers,
        memory_gb=options.reward_memory_gb,
        on_error=cast(OnError, options.on_reward_error),
        parts=RewardParts(options.reward_weights),
    )
