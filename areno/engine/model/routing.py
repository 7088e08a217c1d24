"""Routing replay for mixture-of-experts (MoE) models: record expert choices in rollouts, and replay them in training.

Rollout and training compute router scores with different kernels. After an update, training also uses newer weights than the
rollout. If two scores are close, training may choose different experts than the rollout. In this case, the log-probs of
training and rollout differ by much more than rounding errors. Replaying the rollout's choices removes this difference (Ma et
al. 2025, arXiv:2510.11370, "R3"). The router is still trained, because the weights of the experts' outputs are computed from
the router's current scores.

This module supports any MoE architecture that selects experts with ``topk``. During the forward pass of an MoE layer, a
:class:`Routing` replaces the result of the ``topk`` over all experts. The model computes the weights of the experts' outputs
from the new result. :mod:`areno.engine.model.routers` finds the MoE layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

TOPK = (torch.topk, torch.Tensor.topk)


class Routing(Protocol):
    """Records which experts the routers of a model choose, or replaces their choices."""

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        """Return the ids [T, K] of the experts to use for the T tokens of a pass.

        ``mixture`` is the index of the MoE layer. ``chosen`` [T, K] is the router's own choice.
        """

    def again(self) -> Routing:
        """Return the routing to use when activation checkpointing recomputes the forward pass."""


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model. All routers have the same number of experts and the same number of experts per token."""

    mixtures: int  # number of MoE layers
    experts: int  # experts per MoE layer
    each: int  # experts per token

    @property
    def kind(self) -> torch.dtype:
        """Integer dtype of recorded expert ids. Its largest value marks a token whose experts were not recorded."""
        return torch.uint8 if self.experts < torch.iinfo(torch.uint8).max else torch.int16

    @property
    def bytes_per_token(self) -> int:
        """Size in bytes of one token's recorded expert ids in all MoE layers."""
        return self.mixtures * self.each * self.kind.itemsize


_CURRENT: ContextVar[Routing | None] = ContextVar("areno_routing", default=None)


class Routed(AbstractContextManager[None]):
    """A context manager: within its ``with`` block, ``routing`` records or replaces the expert choices of forward passes.

    If ``routing`` is None, expert choices are neither recorded nor replaced. The context manager can be entered repeatedly, but
    only by one thread at a time.
    """

    def __init__(self, routing: Routing | None) -> None:
        self.routing = routing
        self._tokens: list[Token[Routing | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_CURRENT.set(self.routing))

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._tokens.pop())


def current_routing() -> Routing | None:
    """Return the routing of the current forward pass; None if expert choices are neither recorded nor replaced."""
    return _CURRENT.get()


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two context managers for activation checkpointing: one for the forward pass, and one for its recomputation.

    The recomputation may run in another thread, and after the current :class:`Routing` has changed. The second context manager
    therefore restores the routing of the forward pass.
    """
    routing = current_routing()
    return nullcontext(), Routed(None if routing is None else routing.again())


class _TopkMode(TorchFunctionMode, ABC):
    """Lets a subclass replace the result of each ``topk`` call on scores [tokens, experts]."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in TOPK:
            return result
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        if scores.dim() != 2 or dim not in (-1, 1):
            return result
        replaced = self.replace(scores, result.indices)
        if replaced is result.indices:
            return result
        return torch.return_types.topk((scores.gather(-1, replaced), replaced))  # type: ignore[attr-defined]

    @abstractmethod
    def replace(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the indices [tokens, K] that replace ``chosen``.

        ``chosen`` holds the indices of each token's K highest ``scores``.
        """


class Choosing(_TopkMode):
    """Allows a :class:`Routing` to record or replace the experts that the router of one MoE layer chooses."""

    def __init__(self, routers: Routers, routing: Routing, mixture: int) -> None:
        super().__init__()
        self._routers, self._routing, self._mixture = routers, routing, mixture

    def replace(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the result of :meth:`Routing.choose`.

        Some routers also call ``topk`` to select groups of experts. For such a call, return ``chosen``.
        """
        if (scores.shape[-1], chosen.shape[-1]) != (self._routers.experts, self._routers.each):
            return chosen
        return self._routing.choose(self._mixture, chosen)


class ChoiceRecorder(_TopkMode):
    """Records the choices of all routers in a forward pass.

    ``calls`` has one pair for each ``topk`` call, in the order of the calls. The pair consists of the number of scores per
    token, and the chosen indices [tokens, K].

    Because of rounding, two forward passes over the same tokens can choose different experts. :class:`ChoiceReplay` repeats the
    choices of the first pass in the second pass, so that the passes can be compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, Tensor]] = []

    def replace(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Record ``chosen``, and return it unchanged."""
        self.calls.append((scores.shape[-1], chosen.clone()))
        return chosen


class ChoiceReplay(_TopkMode):
    """Replaces a router's choice of experts with a recorded choice if the two choices differ only because of rounding.

    Args:
        recorded: the recordings to repeat. Their tokens are concatenated in the given order. If the recordings differ from
            each other in the number or the shapes of their ``topk`` calls, no choice is replaced.
        first: index of the recorded token that corresponds to the first token of the forward pass. Tokens after the last
            recorded token keep the router's choices.
        tolerance: maximum difference between the scores of the recorded experts and of the router's own experts, relative to
            the largest score. If the difference is larger, the router's own choice is used.
    """

    def __init__(self, *recorded: ChoiceRecorder, first: int = 0, tolerance: float) -> None:
        super().__init__()
        shapes = {tuple((width, chosen.shape[-1]) for width, chosen in recording.calls) for recording in recorded}
        calls = zip(*(recording.calls for recording in recorded), strict=True) if len(shapes) == 1 else ()
        self._calls = iter([(call[0][0], torch.cat([chosen for _, chosen in call])[first:]) for call in calls])
        self._tolerance = tolerance

    def replace(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the indices [T, K] to use instead of the router's choice ``chosen`` [T, K].

        Each call of this method uses the next recorded ``topk`` call.
        """
        width, recorded = next(self._calls, (0, chosen))
        if (width, recorded.shape[-1]) != (scores.shape[-1], chosen.shape[-1]):
            return chosen
        count = min(len(recorded), len(chosen))
        repeated = torch.cat([recorded[:count], chosen[count:]])
        gaps = scores.gather(-1, chosen).sort().values - scores.gather(-1, repeated).sort().values
        rounded = gaps.abs().amax(-1, keepdim=True) <= self._tolerance * scores.abs().amax()
        return torch.where(rounded, repeated, chosen)


class Recording:
    """Records which experts the routers of a model choose.

    For each MoE layer, ``write`` is called with the index of the layer and the ids [tokens, K] of the experts that its router
    chose.
    """

    def __init__(self, write: Callable[[int, Tensor], None]) -> None:
        self._write = write

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        """See :class:`Routing`."""
        self._write(mixture, chosen)
        return chosen

    def again(self) -> Routing:
        """See :class:`Routing`."""
        return self


class RoutingCount:
    """Counts how many expert choices are replayed, and how many of these choices differ from the router's own choice.

    A choice is the set of experts of one token in one MoE layer.
    """

    def __init__(self) -> None:
        self.replayed: Tensor | float = 0.0
        self.changed: Tensor | float = 0.0

    def add(self, recorded: Tensor, chosen: Tensor, replayed: Tensor) -> None:
        """Count the tokens for which ``replayed`` [T, 1] is True.

        Also count how many of them have different experts in ``recorded`` and ``chosen``. The order of a token's experts does
        not matter.
        """
        missed = (recorded[:, :, None] != chosen[:, None, :]).all(-1).any(-1) & replayed[:, 0]
        self.replayed = self.replayed + replayed.sum()
        self.changed = self.changed + missed.sum()


class Replay:
    """Replays recorded choices. For tokens whose experts were not recorded, the router chooses the experts.

    Args:
        recorded: ids of the K experts of each of T tokens in each MoE layer: [T, MoE layers, K]. Invalid ids mark a token
            whose experts were not recorded.
        routers: the routers of the model.
        count: counter to which the replayed choices are added; None: they are not counted.
    """

    def __init__(self, recorded: Tensor, routers: Routers, count: RoutingCount | None = None) -> None:
        self.recorded, self.routers, self._count = recorded, routers, count

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        """See :class:`Routing`."""
        recorded = self.recorded[:, mixture].to(chosen.dtype)
        replayed = (recorded < self.routers.experts).all(-1, keepdim=True)
        if self._count is not None:
            self._count.add(recorded, chosen, replayed)
        return torch.where(replayed, recorded, chosen)

    def again(self) -> Routing:
        """Return a replay of the same choices, for recomputing the forward pass.

        The returned replay has no ``count``, so that no choice is counted twice.
        """
        return Replay(self.recorded, self.routers)

    def part(self, first: int, count: int) -> Replay:
        """Return a replay of the choices for ``count`` tokens, starting with the token at index ``first``.

        If the recording ends earlier, the router chooses the experts of the remaining tokens.
        """
        records = self.recorded[first : first + count]
        missing = (0, 0, 0, 0, 0, count - len(records))
        return Replay(pad(records, missing, value=torch.iinfo(records.dtype).max), self.routers, self._count)
