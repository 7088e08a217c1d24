"""What policies, critics and reward models share: a ``transformers`` body that takes packed tokens and an attention plan."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from areno.engine.limits import context_length, vocabulary_size
from areno.engine.model.adapter import Adapter
from areno.engine.model.attention import AttentionPlan
from areno.engine.model.routing import Routed, Routers
from areno.engine.model.stages import StageLayers


class Weights:
    """Where the weights of a model are between passes: here, whole on this rank.

    :mod:`areno.engine.parallel.fsdp` has those that are spread over the replicas.
    """

    dtype: torch.dtype | None = None  # what they compute in; None is the type they are kept in
    whole: bool = True  # they are all here

    def gather(self) -> None:
        """Have them here until :meth:`release`."""

    def release(self) -> None:
        """Nobody computes with them for a while."""

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Make a pass whose result may be differentiated; while they are not whole, every rank must make the same ones."""
        return work()


class PackedModel:
    """A ``transformers`` model with a body and a head, whose attention implementation must be areno's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.stage: StageLayers | None = None  # which layers it has, if not all
        self.adapter: Adapter | None = None  # what is trained in place of the weights
        self.weights = Weights()
        self.routers: Routers | None = None  # where they follow the routing of plans
        self._prefix = cast(str, module.base_model_prefix)
        self._body = cast(nn.Module, getattr(module, self._prefix))

    @property
    def config(self) -> Any:
        """The ``transformers`` configuration."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the weights compute in."""
        return self.weights.dtype or next(self.module.parameters()).dtype

    @property
    def context_length(self) -> int | None:
        """Most positions the model was made for, where its configuration says so."""
        return context_length(self.config)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, and width of a policy's logits."""
        return vocabulary_size(self.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, trained or not, in the types that they compute in."""
        kind = self.weights.dtype
        return sum(p.numel() * (kind.itemsize if kind else p.element_size()) for p in self.module.parameters())

    def state(self) -> dict[str, Tensor]:
        """Weights and tables that a checkpoint has, or this rank's shares of them, under every name of a tied one."""
        found: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        for place, child in self.module.named_modules():
            for name, buffer in child.named_buffers(place, recurse=False):
                if name.rpartition(".")[2] not in child._non_persistent_buffers_set:
                    found[name] = buffer
        return found

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all weights here in the block; every rank that shares them must enter it."""
        before = self.weights.whole
        self.weights.gather()
        try:
            yield
        finally:
            if not before:
                self.weights.release()

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters by name, tied ones once."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def body(self, tokens: Tensor, position_ids: Tensor, plan: AttentionPlan, run: int | None = None) -> Tensor:
        """Hidden states [T, C] of tokens [T] at positions [T], attending as ``plan`` says.

        Of a stage they come from the hidden states [T, C] of the layers before, unless these layers are the first; ``run`` is
        the number of the run of neighbouring layers that they pass through, None all that are here.
        """
        body = self._body if run is None or self.stage is None else self.stage.body_of(self._body, run)
        given: dict[str, Any] = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens[None]}
        given |= {"position_ids": position_ids[None], "use_cache": False, "areno": plan}
        if self.routers is None:
            return body(**given).last_hidden_state[0]  # type: ignore[no-any-return]
        with Routed(plan.routing):
            return body(**given).last_hidden_state[0]  # type: ignore[no-any-return]
