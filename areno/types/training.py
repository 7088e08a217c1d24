"""Training rows. Entry i of each per-token list belongs to token i. Token 0 is not predicted, so its loss inputs are unused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from areno.types.sampling import Logprobs

if TYPE_CHECKING:
    from areno.types.routing import RoutingRecord

_LISTS = (
    *("prompt_mask", "tokens", "logprobs", "advantages", "returns", "values", "ref_logprobs"),
    *("prox_logprobs", "teacher_logprobs", "versions", "keep"),
)


@dataclass(slots=True)
class TrainSequence:
    """A token sequence with the per-token inputs of the loss. Arrays and tensors are converted to lists.

    Args:
        prompt_mask: True for context tokens, False for response tokens.
        tokens: prompt and response token ids.
        logprobs: log-probs under the rollout policy, with 0 for prompt tokens.
        advantages: per-token advantages.
        returns: targets of the critic (PPO).
        values: predictions of the critic before the update (PPO).
        ref_logprobs: log-probs under the reference policy, for a KL term.
        reward: scalar reward of the sequence.
        eos_token_id: EOS id of the model.
        loss_mask: True for tokens that count in the loss. None: all tokens for which ``prompt_mask`` is False.
        temperature: sampling temperature of the response. Training computes log-probs at the same temperature. Default:
            the temperature stored in ``logprobs`` if this list is a :class:`~areno.types.Logprobs`, otherwise 1.
        group: index of the row's prompt in the batch.
        truncated: whether the response ended at the token limit instead of at EOS.
        prox_logprobs: log-probs of the proximal policy (the policy before the update), for the decoupled loss.
        teacher_logprobs: log-probs of a teacher, for distillation.
        versions: version of the weights that sampled each token, with -1 for prompt tokens.
        keep: False for tokens that M2PO excludes. The policy loss of an excluded token is set to 0, and this 0 is included in
            the mean over the tokens.
        routed_experts: experts that the rollout's routers chose for each token (see :mod:`areno.types.routing`). Training
            uses the same experts.
        observed: number by which the engine identifies the row's :class:`TokenRecord`. -1 if no record is kept.

    Raises:
        ValueError: ``tokens`` or ``prompt_mask`` is missing, a list is not as long as ``tokens``, or the temperature is not
            finite and above 0.
        TypeError: text, bytes or a dict was passed instead of a list.
    """

    # None is for the constructor only, where it means unset.
    prompt_mask: list[bool] = None  # type: ignore[assignment]
    tokens: list[int] = None  # type: ignore[assignment]
    logprobs: list[float] = None  # type: ignore[assignment]
    advantages: list[float] = None  # type: ignore[assignment]
    returns: list[float] = None  # type: ignore[assignment]
    values: list[float] = None  # type: ignore[assignment]
    ref_logprobs: list[float] = None  # type: ignore[assignment]
    reward: float = 0.0
    eos_token_id: int = 0
    loss_mask: list[bool] | None = None
    temperature: float = None  # type: ignore[assignment]
    group: int = 0
    truncated: bool = False
    prox_logprobs: list[float] = None  # type: ignore[assignment]
    teacher_logprobs: list[float] = None  # type: ignore[assignment]
    versions: list[int] = None  # type: ignore[assignment]
    keep: list[bool] = None  # type: ignore[assignment]
    routed_experts: RoutingRecord | None = field(default=None, compare=False)
    observed: int = field(default=-1, compare=False)

    def __post_init__(self) -> None:
        for name in (*_LISTS, "loss_mask"):
            values = getattr(self, name)
            if values is None and name != "loss_mask":
                setattr(self, name, [])
            elif hasattr(values, "tolist"):  # an array or a tensor
                setattr(self, name, values.tolist())
        if self.temperature is None:
            self.temperature = self.logprobs.temperature if isinstance(self.logprobs, Logprobs) else 1.0
        else:
            self.logprobs = Logprobs(self.logprobs, self.temperature)
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"TrainSequence.temperature must be finite and above 0, got {self.temperature}")
        for name in (*_LISTS, "loss_mask"):
            if isinstance(getattr(self, name), str | bytes | dict):
                raise TypeError(f"TrainSequence.{name} must be a list, got {getattr(self, name)!r:.60}")
        if not self.tokens:
            raise ValueError("TrainSequence.tokens must have at least one token")
        for name in (*_LISTS, "loss_mask"):
            values = getattr(self, name)
            if values and len(values) != len(self.tokens):
                raise ValueError(
                    f"TrainSequence.{name} has {len(values)} entries, but there are {len(self.tokens)} tokens; pass one "
                    "entry per token"
                )
        if self.routed_experts is not None and len(self.routed_experts) != len(self.tokens):
            raise ValueError(
                f"TrainSequence.routed_experts has {len(self.routed_experts)} entries, but there are {len(self.tokens)} "
                "tokens; pass one entry per token"
            )
        if not self.prompt_mask:
            raise ValueError(
                "TrainSequence.prompt_mask is missing; pass True for prompt tokens, False for response tokens"
            )

    @property
    def knows_temperature(self) -> bool:
        """Whether the temperature is known: it was passed, or ``logprobs`` is a :class:`Logprobs`, which has a temperature.

        False if ``temperature`` is only the default.
        """
        return isinstance(self.logprobs, Logprobs)

    def trainable(self) -> list[bool]:
        """Return a list with one entry per token: True if the token counts in the loss.

        The first token never counts, because no token predicts it.
        """
        allowed = self.loss_mask if self.loss_mask is not None else [True] * len(self.tokens)
        mask = [not prompt and keep for prompt, keep in zip(self.prompt_mask, allowed, strict=True)]
        mask[0] = False
        return mask


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Values that the policy update computed for each token of a row.

    The values are from the first forward pass over the row, because later passes see an updated policy. Entries outside the
    loss mask are 0 or False.
    """

    logprobs: list[float]
    clipped: list[bool] | None  # tokens without gradient because of clipping; None if the loss does not mark them


@dataclass(slots=True)
class ModelRole:
    """An auxiliary model of the backend, such as a reference or a critic.

    Args:
        name: name of the role: ``ref``, ``reward``, ``critic`` or a custom name.
        path: checkpoint folder or Hugging Face repo id.
        trainable: whether the model is trained, with an optimizer.
        optimizer_lr: learning rate of a trainable role. None: ``optimizer["lr"]``, or the default of the optimizer options.
        kind: prediction of the model: ``policy`` (log-probs), ``value`` (a value per token) or ``reward`` (a score per
            sequence). ``auto`` derives the kind from ``name``: ``critic...`` and ``value...`` mean ``value``, ``reward...``
            means ``reward``, and other names mean ``policy``.
        optimizer: fields of :class:`areno.engine.train.optimizer.OptimizerOptions` for a trainable role.

    Raises:
        ValueError: a value is invalid, or a frozen role has optimizer settings.
    """

    name: str
    path: str
    trainable: bool
    optimizer_lr: float | None = None
    kind: Literal["auto", "policy", "value", "reward"] = "auto"
    optimizer: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"ModelRole.name must be a non-empty string, got {self.name!r}")
        if self.optimizer_lr is not None and not 0 <= self.optimizer_lr < math.inf:
            raise ValueError(f"ModelRole.optimizer_lr must be finite and not negative, got {self.optimizer_lr}")
        if self.kind not in ("auto", "policy", "value", "reward"):
            raise ValueError(f"ModelRole.kind {self.kind!r} is unknown; use auto, policy, value or reward")
        if not self.trainable and (self.optimizer_lr is not None or self.optimizer):
            raise ValueError(
                f"role {self.name!r} is frozen, so optimizer settings have no effect; remove them, or set trainable=True"
            )

    @property
    def predicts(self) -> Literal["policy", "value", "reward"]:
        """The ``kind`` of the role, with ``auto`` replaced by the kind that the role's name implies."""
        if self.kind != "auto":
            return self.kind
        if self.name.startswith(("critic", "value")):
            return "value"
        return "reward" if self.name.startswith("reward") else "policy"


@dataclass(slots=True)
class PromptItem:
    """One data row prepared for rollout."""

    prompt: str
    solutions: Any
    input_tokens: list[int]
    record: dict[str, Any]


@dataclass(slots=True)
class PromptBatch:
    """The rows of one step, and the number of skipped rows.

    Attributes:
        items: rows that were not skipped.
        scanned: number of rows read for this batch, including skipped rows.
        skipped_long: number of rows of this batch that were skipped because the prompt is too long.
        total_skipped_long: number of skipped rows so far in this iteration over the dataset.
    """

    items: list[PromptItem]
    scanned: int = 0
    skipped_long: int = 0
    total_skipped_long: int = 0

    @property
    def prompts(self) -> list[str]:
        """Prompt texts, in order."""
        return [item.prompt for item in self.items]
