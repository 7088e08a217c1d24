"""What policies, critics and reward models share: a ``transformers`` body that takes packed tokens and an attention plan."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from areno.engine.model.adapter import Adapter
from areno.engine.model.attention import AttentionPlan


class PackedModel:
    """A ``transformers`` model with a body and a head.

    Args:
        module: the whole model; its attention implementation must be areno's.

    Attributes:
        adapter: what is trained in place of the weights; None where those are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.adapter: Adapter | None = None
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
        return next(self.module.parameters()).dtype

    @property
    def context_length(self) -> int | None:
        """Most positions the model was made for, where its configuration says so."""
        value = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(value) if value else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, trained or not."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters by name, tied ones once."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def body(self, tokens: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states [T, C] of tokens [T] at positions [T], attending as ``plan`` says."""
        out = self._body(input_ids=tokens[None], position_ids=position_ids[None], use_cache=False, areno=plan)
        return out.last_hidden_state[0]
