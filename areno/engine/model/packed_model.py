"""Base class of policies, critics and reward models.

Each model has a ``transformers`` body, which computes the hidden states of packed tokens. An attention plan determines which of
the tokens attend to each other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from areno.engine.limits import context_length, vocabulary_size
from areno.engine.model.adapter import Adapter
from areno.engine.model.attention import AttentionPlan
from areno.engine.model.routing import Routed, Routers
from areno.engine.model.stages import StageLayers, model_body


class Weights:
    """How a model's weights are stored. In this base class, the weights are unsharded; a subclass shards the weights."""

    dtype: torch.dtype | None = None  # compute dtype; None: the storage dtype
    whole: bool = True  # whether all weights are gathered on this rank

    def gather(self) -> None:
        """Gather the weights, and keep them gathered until :meth:`release` is called."""

    def release(self) -> None:
        """Reshard gathered weights."""

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run the differentiable pass ``work``.

        While the weights are sharded, all ranks must run the same passes in the same order.
        """
        return work()


class PackedModel:
    """A ``transformers`` model with a body and a head. The model must use areno's attention implementation."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.stage: StageLayers | None = None  # the layers of this pipeline stage; None: all
        self.adapter: Adapter | None = None  # trained instead of the weights
        self.weights = Weights()
        self.routers: Routers | None = None  # set if routers record or replay expert choices
        self._prefix = cast(str, module.base_model_prefix)
        self._body = model_body(module)

    @property
    def config(self) -> Any:
        """The ``transformers`` configuration."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self.weights.dtype or next(self.module.parameters()).dtype

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of a sequence; None if the configuration states no limit."""
        return context_length(self.config)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding table, which is also the width of a policy's logits."""
        return vocabulary_size(self.config)

    @property
    def weight_bytes(self) -> int:
        """Total size in bytes of the trainable and the frozen weights, in the compute dtype."""
        kind = self.weights.dtype
        return sum(p.numel() * (kind.itemsize if kind else p.element_size()) for p in self.module.parameters())

    def state(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name. A tied parameter appears under each of its names.

        For sharded parameters, the state contains this rank's shards.
        """
        tensors: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        for place, child in self.module.named_modules():
            for name, buffer in child.named_buffers(place, recurse=False):
                if name.rpartition(".")[2] not in child._non_persistent_buffers_set:
                    tensors[name] = buffer
        return tensors

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights that FSDP shards, and keep them gathered within the ``with`` block.

        All ranks must enter the block.
        """
        before = self.weights.whole
        self.weights.gather()
        try:
            yield
        finally:
            if not before:
                self.weights.release()

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters with their names. A tied parameter appears only once."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def body(self, tokens: Tensor, position_ids: Tensor, plan: AttentionPlan, run: int | None = None) -> Tensor:
        """Return the hidden states [T, C] of tokens [T] at positions [T]. The attention follows ``plan``.

        Later pipeline stages take the hidden states [T, C] of the previous stage instead of tokens. ``run`` is the index of the
        model chunk to apply (see :class:`StageLayers`); None applies all layers of this rank.
        """
        body = self._body if run is None or self.stage is None else self.stage.body_of(self._body, run)
        inputs: dict[str, Any] = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens[None]}
        inputs |= {"position_ids": position_ids[None], "use_cache": False, "areno": plan}
        if self.routers is None:
            return body(**inputs).last_hidden_state[0]  # type: ignore[no-any-return]
        with Routed(plan.routing):
            return body(**inputs).last_hidden_state[0]  # type: ignore[no-any-return]
