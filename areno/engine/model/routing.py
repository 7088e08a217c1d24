"""What the routers of a mixture-of-experts model choose: recorded while text is generated, replayed when it is trained on.

Rollout and training compute a router's scores with other kernels, and after an update with other weights. Where two scores lie
close together, that is another expert, and a gap between the log-probs of rollout and training which no rounding explains.
With the choices of the rollout replayed the gap is gone (Ma et al. 2025, arXiv:2510.11370, "R3"). The weights of the experts
still come from the router's present scores, so it is trained.

Nothing here knows a model. While the forward pass of a mixture runs, the result of its ``topk`` over all experts is what a
:class:`Routing` makes of it; how scores become weights stays the model's own. :mod:`areno.engine.model.routers` finds the
mixtures.
"""

from __future__ import annotations

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
    """Hears what routers choose, and may choose otherwise."""

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        """The experts [T, K] that count for the tokens of a pass, where a router has ``chosen`` [T, K]."""

    def again(self) -> Routing:
        """The routing of a forward pass that is made again, to compute activations that were not kept."""


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, all of which choose as many of as many experts."""

    mixtures: int
    experts: int  # of one mixture
    each: int  # experts of one token

    @property
    def kind(self) -> torch.dtype:
        """The smallest type of their choices, whose largest number is no expert's."""
        return torch.uint8 if self.experts < torch.iinfo(torch.uint8).max else torch.int16

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the choices for one token."""
        return self.mixtures * self.each * self.kind.itemsize


_CURRENT: ContextVar[Routing | None] = ContextVar("areno_routing", default=None)


class Routed(AbstractContextManager[None]):
    """A block whose forward passes are routed; it may be entered again, in another thread as well."""

    def __init__(self, routing: Routing | None) -> None:
        self.routing = routing
        self._tokens: list[Token[Routing | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_CURRENT.set(self.routing))

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._tokens.pop())


def current_routing() -> Routing | None:
    """The routing of the pass that runs; None where routers are left alone."""
    return _CURRENT.get()


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a layer under activation checkpointing: of its forward pass, and of the one in the backward pass.

    The latter may run in another thread, when other rows are in their forward pass already.
    """
    routing = current_routing()
    return nullcontext(), Routed(None if routing is None else routing.again())


class Choosing(TorchFunctionMode):
    """Lets a routing have the last word on the ``topk`` of one mixture over all its experts."""

    def __init__(self, routers: Routers, routing: Routing, mixture: int) -> None:
        super().__init__()
        self._routers, self._routing, self._mixture = routers, routing, mixture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass everything else through."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in TOPK:
            return found
        scores = args[0] if args else kwargs["input"]
        wanted = self._routers.experts, self._routers.each
        if scores.dim() != 2 or (scores.shape[-1], found.indices.shape[-1]) != wanted:
            return found
        taken = self._routing.choose(self._mixture, found.indices)
        if taken is found.indices:
            return found
        return torch.return_types.topk((scores.gather(-1, taken), taken))  # type: ignore[attr-defined]


class Recording:
    """Writes down what routers choose; ``write`` takes the number of a mixture and its choices [T, K]."""

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
    """How many choices of a router, one per token and mixture, were replayed, and how many of them it would not have made."""

    def __init__(self) -> None:
        self.replayed: Tensor | float = 0.0
        self.changed: Tensor | float = 0.0

    def add(self, recorded: Tensor, chosen: Tensor, known: Tensor) -> None:
        """Count tokens with a record, of which ``known`` [T, 1] says which they are; the order of experts is no difference."""
        missed = (recorded[:, :, None] != chosen[:, None, :]).all(-1).any(-1) & known[:, 0]
        self.replayed = self.replayed + known.sum()
        self.changed = self.changed + missed.sum()


class Replay:
    """Chooses again what was recorded; tokens without a record are left to the router.

    Args:
        recorded: experts of the tokens of a pass [T, mixtures, K]; a number that is no expert's where there is no record.
        routers: of the model.
        count: what to count the choices in; None counts nothing.
    """

    def __init__(self, recorded: Tensor, routers: Routers, count: RoutingCount | None = None) -> None:
        self.recorded, self.routers, self._count = recorded, routers, count

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        """See :class:`Routing`."""
        recorded = self.recorded[:, mixture].to(chosen.dtype)
        known = (recorded < self.routers.experts).all(-1, keepdim=True)
        if self._count is not None:
            self._count.add(recorded, chosen, known)
        return torch.where(known, recorded, chosen)

    def again(self) -> Routing:
        """The same choices, which are counted already."""
        return Replay(self.recorded, self.routers)

    def part(self, first: int, count: int) -> Replay:
        """The replay of ``count`` tokens from ``first`` on; those behind the last one have no record."""
        own = self.recorded[first : first + count]
        missing = (0, 0, 0, 0, 0, count - len(own))
        return Replay(pad(own, missing, value=torch.iinfo(own.dtype).max), self.routers, self._count)
