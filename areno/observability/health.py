"""Early warnings when a run cannot learn, each with the reason and what to try.

Special here: a warning is given once per episode. An episode begins when its condition has held long enough and ends
after ``window`` steps without it, so a condition that flickers does not flood the log. The state is plain JSON and goes
into the checkpoint: a resumed run warns exactly as an uninterrupted one would.
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
"""Mean |rollout - train log-prob| that is worth a warning in bf16."""
LOGPROB_GAP_LIMIT_FP32 = 1e-3
"""The same when both sides compute in fp32."""
_LOSS_IS_ZERO = 1e-6
PARTS_WINDOW = 20
"""Steps over which the means of a reward's parts are compared."""
_OPPOSED = -0.7  # correlation of two parts' means; by chance one in a few thousand windows has such a one
_RISES = 0.5  # correlation of the reward's mean with the step
_REWARD = ""  # the name of the mean reward among those of its parts


@dataclass(slots=True)
class _Episode:
    """One condition's history: steps in a row with it and without it, and whether it was warned about."""

    held: int = 0
    absent: int = 0
    warned: bool = False


class HealthMonitor:
    """Watches each step's statistics and says what is wrong.

    Args:
        window: steps in a row with equal rewards before that is a warning, and without a condition before it is one again.
        logprob_gap_limit: tolerated mean absolute rollout/train log-prob gap; ``LOGPROB_GAP_LIMIT_FP32`` in fp32.
        grouped: advantages compare the samples of a prompt, so that they sum to zero.
        max_new_tokens: limit of a response; None where it is not known.
        settings: what options of ``areno train`` that warnings name are called in this run, where that differs.

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
        self._gap_limit = logprob_gap_limit
        self._episodes: dict[str, _Episode] = {}
        self._max_new_tokens = max_new_tokens
        self._settings = settings or {}
        self._parts: deque[dict[str, float]] = deque(maxlen=PARTS_WINDOW)
        self._loss_explained = not grouped  # the explanation is of grouped advantages

    def observe(
        self,
        step: int,
        stats: Mapping[str, float],
        rewards: Sequence[float] = (),
        groups: Sequence[int] = (),
        truncated: Sequence[bool] = (),
    ) -> list[str]:
        """Warnings to show after a finished step, most often none.

        Args:
            step: step index, for the messages.
            stats: of it ``loss``, ``grad_norm``, ``response_len``, ``logp_abs_diff_mean`` and ``reward_errors``
                (samples dropped because their reward function failed) are read; what is missing is not judged.
            rewards: one per sample, with parts as :class:`~areno.types.WeightedReward`; empty for algorithms without.
            groups: prompt index of each sample, aligned with ``rewards``.
            truncated: whether each response ended at the token limit.

        Raises:
            ValueError: ``rewards`` and ``groups`` differ in length.
        """
        columns = {_REWARD: rewards, **part_columns(rewards)} if rewards else {}
        self._parts.append({name: statistics.fmean(column) for name, column in columns.items()})
        warnings = [
            text
            for name, condition in self._conditions(stats, rewards, groups, truncated).items()
            for text in self._follow(name, *condition)
        ]
        for option, name in self._settings.items():
            warnings = [text.replace(option, name) for text in warnings]
        return [f"step {step}: {text}" for text in warnings]

    def explain(self, step: int, stats: Mapping[str, float], rewards: Sequence[float] = ()) -> str:
        """Once in a run, why a loss near 0 is no problem; else an empty text. Arguments as for :meth:`observe`."""
        loss, grad_norm = stats.get("loss"), stats.get("grad_norm")
        if self._loss_explained or not rewards or loss is None or grad_norm is None:
            return ""
        if not (abs(loss) < _LOSS_IS_ZERO and 0 < grad_norm < math.inf):
            return ""
        self._loss_explained = True
        return (
            f"step {step}: the loss is near 0, and this is normal for group-normalised policy gradients: advantages of "
            f"a group sum to zero, so the value cancels and the gradient does not (norm {grad_norm:.3g}). Watch the "
            "reward instead"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        episodes = {name: [e.held, e.absent, e.warned] for name, e in self._episodes.items()}
        return {"episodes": episodes, "loss_explained": self._loss_explained, "parts": [*self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` gave."""
        self._episodes = {
            name: _Episode(int(held), int(absent), bool(warned))
            for name, (held, absent, warned) in state["episodes"].items()
        }
        self._loss_explained = self._loss_explained or bool(state["loss_explained"])
        self._parts.extend(state.get("parts", []))

    def _follow(self, name: str, holds: bool | None, message: str) -> list[str]:
        """Advance one condition's episode by one step."""
        if holds is None:
            return []
        episode = self._episodes.setdefault(name, _Episode())
        if not holds:
            episode.held = 0
            episode.absent += 1
            episode.warned = episode.warned and episode.absent < self._window
            return []
        episode.held += 1
        episode.absent = 0
        if episode.warned or episode.held < (self._window if name == "equal_rewards" else 1):
            return []
        episode.warned = True
        return [message.replace("{n}", str(episode.held))]

    def _conditions(
        self, stats: Mapping[str, float], rewards: Sequence[float], groups: Sequence[int], truncated: Sequence[bool]
    ) -> dict[str, tuple[bool | None, str]]:
        """By name: whether it is met (None: the step has no evidence), and the warning; ``{n}`` is the steps it has held."""
        tied = _all_tied(rewards, groups)
        low, high = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
        equal = f"all rewards are {low:g}" if low == high else "rewards are equal within every prompt's group"
        length, gap = stats.get("response_len"), stats.get("logp_abs_diff_mean")
        by_context = length is not None and self._max_new_tokens is not None and length < self._max_new_tokens
        limit, remedy = ("the token limit", "--max-new-tokens")
        if by_context:
            limit, remedy = "the context length", "--max-context-len (or take shorter prompts, --max-prompt-tokens)"
        grad_norm, dropped = stats.get("grad_norm"), stats.get("reward_errors")
        seen = {name: stats[name] for name in ("loss", "grad_norm") if name in stats}
        bad = ", ".join(f"{name} is {value}" for name, value in seen.items() if not math.isfinite(value))
        return {
            "equal_rewards": (
                tied,
                f"{equal}, for {{n}} steps: nothing can be learned, because advantages compare the samples of a prompt "
                "and here they are all zero. If this is the best reward the task is solved: stop, or use harder "
                "problems. If not, call the reward function on an answer that you know is right, try easier problems, "
                "a better starting model (SFT first), a higher --temperature or a larger --n-samples",
            ),
            "all_truncated": (
                all(truncated) if truncated else None,
                f"every response ({len(truncated)}) was cut at {limit}: none came to its end, so most rewards cannot be "
                f"right. Raise {remedy}; if the model never stops, check its EOS token and chat template, or teach it "
                "to stop with SFT first",
            ),
            "zero_gradient": (
                # Equal rewards explain a zero gradient, and have a warning of their own.
                None if grad_norm is None or tied else grad_norm == 0,
                "the gradient is exactly zero: the weights do not move. Check that some response tokens are trained on "
                "(loss mask), that the advantages are not all zero, and that the loss is not clipped everywhere",
            ),
            "non_finite": (
                bool(bad) if seen else None,
                f"{bad}: the update is unusable, and so are later checkpoints. Begin a new run from the last checkpoint "
                "before this step, with a lower --lr, a lower --grad-clip-norm, or --dtype float32",
            ),
            "short_responses": (
                None if length is None else length <= 1,
                f"responses have collapsed to {length} tokens on average: the model stops at once. Check that the "
                "reward does not favour an empty answer, and lower --lr",
            ),
            "logprob_gap": (
                None if gap is None else gap > self._gap_limit,
                f"mean |rollout - train log-prob| is {gap}, above {self._gap_limit:g}: the policy that is trained is "
                "not the one that sampled. Take fewer optimizer steps per batch (drop --gradient-accumulation-steps) "
                "or a lower learning rate; if it is so from the first step, try --dtype float32",
            ),
            "opposed_parts": _opposed(self._parts),
            "reward_errors": (
                None if dropped is None else dropped > 0,
                f"the reward function failed on {dropped or 0:g} samples, which were dropped; the log names each record",
            ),
        }


def unusable(stats: Mapping[str, float]) -> bool:
    """Whether an update of a step was skipped, or its loss or gradient is not finite."""
    numbers = (stats.get(name, 0.0) for name in ("loss", "grad_norm"))
    return stats.get("update_skipped", 0.0) > 0 or not all(map(math.isfinite, numbers))


def _opposed(history: Sequence[Mapping[str, float]]) -> tuple[bool | None, str]:
    """Whether the part that rises most and the one that falls most oppose each other while the reward rises; the warning."""
    names = [name for name in (history[0] if history else ()) if all(name in means for means in history)]
    if len(history) < PARTS_WINDOW or len(names) < 3:
        return None, ""
    columns = np.array([[means[name] for means in history] for name in names])
    with np.errstate(divide="ignore", invalid="ignore"):  # what does not vary correlates with nothing
        correlation = np.nan_to_num(np.corrcoef([*columns.round(9), range(PARTS_WINDOW)]))
    trends = correlation[-1, 1:-1]
    up, down = 1 + int(trends.argmax()), 1 + int(trends.argmin())
    if correlation[-1, 0] <= _RISES or not trends.max() > 0 > trends.min() or correlation[up, down] > _OPPOSED:
        return False, ""
    halves = columns.reshape(len(names), 2, -1).mean(2)
    rising, falling = names[up], names[down]
    rose, fell = ("{:.3g} to {:.3g}".format(*halves[place]) for place in (up, down))
    return True, (
        f"parts of the reward move against each other: over {PARTS_WINDOW} steps `{rising}` rose ({rose}, means of the halves) "
        f"and `{falling}` fell ({fell}; correlation {correlation[up, down]:.2f}), while the reward as a whole rose. The policy "
        f"may be exploiting `{rising}`: read late samples where it is high and `{falling}` low (areno inspect RUN), then close "
        f"what they exploit or lower its weight (--reward-weights {rising}=...)"
    )


def _all_tied(rewards: Sequence[float], groups: Sequence[int]) -> bool | None:
    """Whether no group has two different rewards; groups of one compare across the batch; None without evidence."""
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards need as many group indices, got {len(groups)}")
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    compared = [values for values in members.values() if len(values) > 1] or [list(rewards)]
    return all(min(values) == max(values) for values in compared) if len(rewards) > 1 else None
