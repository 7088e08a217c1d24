"""Warns early that a run cannot learn. Each warning names its cause and a remedy.

Equal rewards cause a warning only after ``window`` consecutive steps. Most other conditions cause a warning at once. A
condition that comes and goes must not flood the log: after a warning, the condition must be absent for ``window`` consecutive
steps before the same warning can be issued again. Checkpoints store the state of the monitor as JSON, so that a resumed run
issues the same warnings as an uninterrupted run.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areno.types import part_columns

LOGPROB_GAP_LIMIT = 0.05
"""A run warns if the mean |rollout - train log-prob| exceeds this limit."""
LOGPROB_GAP_LIMIT_FP32 = 1e-3
"""The limit on the mean |rollout - train log-prob| if rollout and training compute in fp32."""
_LOSS_IS_ZERO = 1e-6
PARTS_WINDOW = 20
"""Number of latest steps in which the monitor looks for reward parts that move in opposite directions."""
_OPPOSED = -0.7  # correlation of two parts' means; reached by chance in one of a few thousand windows
_RISES = 0.5  # correlation of the mean reward with the step
_REWARD = ""  # key of the mean reward, next to the keys of its parts


def gap_limit_of(*, fp32: bool, stale: bool) -> float:
    """Return the limit of a run's log-prob gap: the mean |rollout - train log-prob| above which the run warns.

    With stale samples, the limit is infinite: an earlier policy sampled the tokens, so a gap is expected.
    """
    if stale:
        return math.inf
    return LOGPROB_GAP_LIMIT_FP32 if fp32 else LOGPROB_GAP_LIMIT


def gap_remedy(limit: float) -> str:
    """Return the remedy for a log-prob gap (mean |rollout - train log-prob|) above ``limit``.

    Fewer optimizer steps per batch are not a remedy: the gap is measured only in the first optimizer step of a batch.
    """
    first = (
        "Check that rollout and training have the same weights and --temperature"
        if limit <= LOGPROB_GAP_LIMIT_FP32
        else "Use --dtype float32"
    )
    return f"{first}; for a mixture-of-experts model, also use --return-routed-experts"


@dataclass(slots=True)
class _History:
    """The history of a warning's condition, and whether the warning was issued.

    ``held`` counts consecutive steps with the condition, and ``absent`` counts consecutive steps without the condition.
    """

    held: int = 0
    absent: int = 0
    warned: bool = False


class HealthMonitor:
    """Checks the statistics of each step and issues warnings.

    Args:
        window: the monitor warns about equal rewards if the rewards within every group are equal for this many consecutive
            steps. The monitor repeats a warning only after its cause was absent for at least this many consecutive steps.
        logprob_gap_limit: the monitor warns if the mean absolute difference between rollout and train log-probs exceeds
            this limit.
        grouped: whether advantages are relative to the mean of their group. Such advantages sum to zero, so the loss is near
            0, which :meth:`explain` explains to the user.
        max_new_tokens: maximum length of a response, in tokens; None if unknown.
        settings: maps options of ``areno train`` to the corresponding settings of an experiment (``areno run``). The
            warnings then name the settings instead of the options.

    Raises:
        ValueError: ``window`` is below 1.
    """

    def __init__(
        self,
        window: int = 5,
        *,
        logprob_gap_limit: float = LOGPROB_GAP_LIMIT,
        grouped: bool = True,
        max_new_tokens: int | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 step, got {window}")
        self._window = window
        self.gap_limit = logprob_gap_limit
        self._histories: dict[str, _History] = {}
        self._max_new_tokens = max_new_tokens
        self._settings = settings or {}
        self._parts: deque[dict[str, float]] = deque(maxlen=PARTS_WINDOW)
        self._start: list[float] = []  # mean rewards of the first steps
        self._opposed = False  # whether parts have moved in opposite directions in any step
        self._loss_explained = not grouped  # the explanation applies to grouped advantages only

    def observe(
        self,
        step: int,
        stats: Mapping[str, float],
        rewards: Sequence[float] = (),
        groups: Sequence[int] = (),
        truncated: Sequence[bool] = (),
    ) -> list[str]:
        """Process a finished step and return the warnings to show, usually none.

        Args:
            step: step number, stated in each returned warning.
            stats: statistics of the step. The monitor uses ``loss``, ``grad_norm``, ``update_skipped``, ``loss_scale``,
                ``response_len``, ``logp_abs_diff_mean`` and ``reward_errors`` (number of samples dropped because the reward
                function failed). Each of these statistics may be missing.
            rewards: reward of each sample; empty if the step has no rewards. A reward with parts is a
                :class:`~areno.types.WeightedReward`.
            groups: prompt index of each sample, aligned with ``rewards``.
            truncated: for each response, whether the response was truncated.

        Raises:
            ValueError: ``rewards`` and ``groups`` differ in length.
        """
        columns = {_REWARD: rewards, **part_columns(rewards)} if rewards else {}
        self._parts.append({name: statistics.fmean(column) for name, column in columns.items()})
        if rewards and len(self._start) < self._window:
            self._start.append(self._parts[-1][_REWARD])
        warnings = [
            text
            for name, condition in self._conditions(stats, rewards, groups, truncated).items()
            for text in self._follow(name, *condition)
        ]
        for option, name in self._settings.items():
            warnings = [text.replace(option, name) for text in warnings]
        return [f"step {step}: {text}" for text in warnings]

    def explain(self, step: int, stats: Mapping[str, float], rewards: Sequence[float] = ()) -> str:
        """Return an explanation of a loss near 0, once per run. Return "" if no explanation is due.

        The arguments are those of :meth:`observe`.
        """
        loss, grad_norm = stats.get("loss"), stats.get("grad_norm")
        if self._loss_explained or not rewards or loss is None or grad_norm is None:
            return ""
        if not (abs(loss) < _LOSS_IS_ZERO and 0 < grad_norm < math.inf):
            return ""
        self._loss_explained = True
        return (
            f"step {step}: the loss is near 0, which is normal for group-normalized policy gradients: the advantages of a "
            f"group sum to zero. The gradient is not zero (norm {grad_norm:.3g}). Watch the reward instead of the loss"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor as plain JSON values."""
        histories = {name: [e.held, e.absent, e.warned] for name, e in self._histories.items()}
        return {
            **{"episodes": histories, "loss_explained": self._loss_explained, "parts": [*self._parts]},
            **{"start": [*self._start], "opposed": self._opposed},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned."""
        self._histories = {
            name: _History(int(held), int(absent), bool(warned))
            for name, (held, absent, warned) in state["episodes"].items()
        }
        self._loss_explained = self._loss_explained or bool(state["loss_explained"])
        self._parts.extend(state.get("parts", []))
        self._start = list(state.get("start", []))
        self._opposed = bool(state.get("opposed"))

    def _follow(self, name: str, holds: bool | None, message: str) -> list[str]:
        """Record whether a condition held in a step, and return its warning if a warning is due.

        If ``holds`` is None (unknown), the step is ignored.
        """
        if holds is None:
            return []
        history = self._histories.setdefault(name, _History())
        if not holds:
            history.held = 0
            history.absent += 1
            history.warned = history.warned and history.absent < self._window
            return []
        history.held += 1
        history.absent = 0
        if history.warned or history.held < (self._window if name == "equal_rewards" else 1):
            return []
        history.warned = True
        return [message.replace("{n}", str(history.held))]

    def _conditions(
        self, stats: Mapping[str, float], rewards: Sequence[float], groups: Sequence[int], truncated: Sequence[bool]
    ) -> dict[str, tuple[bool | None, str]]:
        """Map the name of each condition to two values: whether the condition holds in this step, and its warning.

        The first value is None if the statistics do not show whether the condition holds. ``{n}`` in a warning stands for the
        number of consecutive steps in which the condition has held.
        """
        tied, cut = _all_tied(rewards, groups), all(truncated) if truncated else None
        opposed = _opposed(self._parts)
        self._opposed = self._opposed or bool(opposed[0])
        length, gap = stats.get("response_len"), stats.get("logp_abs_diff_mean")
        grad_norm, dropped = stats.get("grad_norm"), stats.get("reward_errors")
        checked = {name: stats[name] for name in ("loss", "grad_norm") if name in stats}
        if overflowed(stats):
            checked.pop("grad_norm", None)
        bad = ", ".join(f"{name} is {value}" for name, value in checked.items() if not math.isfinite(value))
        return {
            "equal_rewards": (tied, self._equal(rewards, bool(cut), length)),
            "all_truncated": (None if self._opposed else cut, self._truncated(len(truncated), length)),
            "zero_gradient": (
                # Equal rewards explain a zero gradient, and have their own warning.
                None if grad_norm is None or tied else grad_norm == 0,
                "the gradient is exactly zero, so nothing can be learned from this step. Check that the loss mask selects "
                "response tokens, that some advantages are not zero, and that the loss does not clip every token",
            ),
            "non_finite": (
                bool(bad) if checked else None,
                f"{bad}: the update failed, and later checkpoints may be unusable. Start a new run from the last checkpoint "
                "before this step, with a lower --lr, a lower --grad-clip-norm, or --dtype float32",
            ),
            "short_responses": (
                None if length is None else length <= 1,
                f"responses have collapsed to {length} tokens on average: the model stops immediately. Check that the "
                "reward does not favor empty responses, and lower --lr",
            ),
            "logprob_gap": (
                None if gap is None else gap > self.gap_limit,
                f"mean |rollout - train log-prob| is {gap}, above {self.gap_limit:g}: the trained policy differs from the "
                f"sampling policy. {gap_remedy(self.gap_limit)}",
            ),
            "opposed_parts": opposed,
            "reward_errors": (
                None if dropped is None else dropped > 0,
                f"the reward function failed on {dropped or 0:g} samples, which were dropped; see the log for the reasons",
            ),
        }

    @property
    def _moved(self) -> int:
        if len(self._start) < self._window or _REWARD not in self._parts[-1]:
            return 0
        mean = self._parts[-1][_REWARD]
        return (mean > max(self._start)) - (mean < min(self._start))

    def _equal(self, rewards: Sequence[float], cut: bool, length: float | None) -> str:
        low, high = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
        equal = f"all rewards are {low:g}" if low == high else "rewards are equal within every prompt's group"
        seen = f"{equal} for {{n}} steps: nothing can be learned from equal rewards. "
        if self._opposed:
            return (
                f"{seen}The policy may be exploiting the reward instead of solving the task: reward parts have moved in "
                "opposite directions while the total reward rose (see the earlier warning)"
            )
        if self._moved < 0 and low == high:
            return f"{seen}Earlier rewards were higher: the policy has collapsed. Start again with a lower --lr"
        if self._moved > 0 and cut:
            return (
                f"{seen}The rewards are higher than at the start, but all responses are truncated: the reward may simply grow "
                "with length or repetition. Run `areno inspect RUN`, and read samples"
            )
        if self._moved > 0:
            return (
                f"{seen}The rewards are higher than at the start. Run `areno inspect RUN`, and read recent samples. If their "
                "answers are right, the task is solved: stop the run, or use harder problems"
            )
        if cut:
            return (
                f"{seen}All responses are truncated, and truncation may be why their rewards are equal: first raise "
                f"{self._limit(length)[1]}"
            )
        return (
            f"{seen}Test the reward function on a correct answer. If this answer gets a higher reward than the samples, try "
            "easier problems, a better starting model (SFT first), a higher --temperature or a larger --n-samples"
        )

    def _limit(self, length: float | None) -> tuple[str, str]:
        if length is not None and self._max_new_tokens is not None and length < self._max_new_tokens:
            return "the context length", "--max-context-len (or lower --max-prompt-tokens)"
        return "the token limit", "--max-new-tokens"

    def _truncated(self, count: int, length: float | None) -> str:
        limit, remedy = self._limit(length)
        seen = f"all {count} responses were truncated at {limit}"
        if self._moved > 0:
            return (
                f"{seen}, and the reward is higher than at the start: the reward may simply grow with length or repetition. "
                "Run `areno inspect RUN`, and read recent samples. Do not raise the limit: with a higher limit, the "
                "responses would only become longer"
            )
        if self._moved < 0:
            return (
                f"{seen}, and the reward is lower than at the start: the policy has collapsed and no longer ends its answers. "
                "Start again from an earlier checkpoint with a lower --lr"
            )
        return (
            f"{seen}, so most rewards are unreliable. Raise {remedy}. If the model never ends its answers, check its EOS token "
            "and chat template, or run SFT first, so that the model learns to stop"
        )


def overflowed(stats: Mapping[str, float]) -> bool:
    """Return whether an update was skipped because a gradient overflowed in fp16.

    An occasional overflow is normal: the loss scale is lowered until gradients do not overflow. If updates overflow even at
    the minimum scale, the engine stops the run.
    """
    return "loss_scale" in stats and stats.get("update_skipped", 0.0) > 0 and math.isfinite(stats.get("loss", 0.0))


def unusable(stats: Mapping[str, float]) -> bool:
    """Return True if an update was skipped, or if its loss or gradient norm is not finite.

    If the update was skipped only because a gradient overflowed in fp16, return False.
    """
    if overflowed(stats):
        return False
    numbers = (stats.get(name, 0.0) for name in ("loss", "grad_norm"))
    return stats.get("update_skipped", 0.0) > 0 or not all(map(math.isfinite, numbers))


def _opposed(history: Sequence[Mapping[str, float]]) -> tuple[bool | None, str]:
    """Detect that two parts of the reward move in opposite directions while the reward rises. Also return the warning.

    The two parts are the part that rises most steadily and the part that falls most steadily. The result is True only if these
    two parts are anticorrelated. It is None if the history is too short or has fewer than two parts.
    """
    names = [name for name in (history[0] if history else ()) if all(name in means for means in history)]
    if len(history) < PARTS_WINDOW or len(names) < 3:
        return None, ""
    columns = np.array([[means[name] for means in history] for name in names])
    with np.errstate(divide="ignore", invalid="ignore"):  # a constant has no correlation
        correlation = np.nan_to_num(np.corrcoef([*columns.round(9), range(PARTS_WINDOW)]))
    trends = correlation[-1, 1:-1]
    up, down = 1 + int(trends.argmax()), 1 + int(trends.argmin())
    if correlation[-1, 0] <= _RISES or not trends.max() > 0 > trends.min() or correlation[up, down] > _OPPOSED:
        return False, ""
    halves = columns.reshape(len(names), 2, -1).mean(2)
    rising, falling = names[up], names[down]
    rise, fall = ("{:.3g} to {:.3g}".format(*halves[part]) for part in (up, down))
    return True, (
        f"reward parts move in opposite directions while the total reward rises. Between the first and the second half of "
        f"the last {PARTS_WINDOW} steps, the mean of `{rising}` rose from {rise}, and the mean of `{falling}` fell from {fall} "
        f"(correlation {correlation[up, down]:.2f}). The policy may be exploiting `{rising}`. Run `areno inspect RUN`, and "
        f"read recent samples in which `{rising}` is high and `{falling}` is low. Then fix the loophole, or lower the weight "
        f"of `{rising}` (--reward-weights {rising}=...)"
    )


def _all_tied(rewards: Sequence[float], groups: Sequence[int]) -> bool | None:
    """Return whether rewards are equal within every group; None for fewer than two rewards.

    Groups of one sample are ignored. If there are no other groups, the whole batch counts as one group.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"rewards and groups must have the same length, got {len(rewards)} and {len(groups)}")
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    compared = [values for values in members.values() if len(values) > 1] or [list(rewards)]
    return all(min(values) == max(values) for values in compared) if len(rewards) > 1 else None
