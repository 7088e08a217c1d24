"""Linear-attention layers (gated delta nets) inside packed calls.

Such a layer carries a state along the sequence, so packed neighbours would leak into each other: the stock code runs on
over the border without a word. Each layer's ``forward`` is therefore wrapped. For training it sees one padded row per
sequence, which is exact because a causal scan never looks at its right padding; for rollout it runs sequence by sequence
against per-slot states, since padding would decay a state that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Forward = Callable[..., Tensor]


class RecurrentPlan(Protocol):
    """A plan that knows how to run a stateful layer over its tokens."""

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """Run ``forward`` over hidden [T, C]; returns [T, C]."""
        ...


# Rows behind the slots, for the padding of a decode step: what it computes must not reach anybody's state.
SCRATCH = 8


class SlotStates:
    """Conv and recurrent states of every layer, one row per cache slot; a zero row means no past.

    It answers the calls that a gated delta net makes of a ``transformers`` cache: a call reads the rows chosen by
    :meth:`at`, and writes them back when the layer has finished.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._conv: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}
        self._rows = torch.zeros(0, dtype=torch.long)
        self._conv_rows: Tensor | None = None

    def at(self, module: Any, rows: Tensor) -> SlotStates:
        """Choose the slots that the next call of ``module`` reads and writes."""
        layer = module.layer_idx
        if layer not in self._conv:
            weight = module.conv1d.weight
            self._conv[layer] = weight.new_zeros(self.slots + SCRATCH, module.conv_dim, module.conv_kernel_size)
            self._recurrent[layer] = torch.zeros(
                self.slots + SCRATCH, module.num_v_heads, module.head_k_dim, module.head_v_dim, device=weight.device
            )
        self._rows = rows
        return self

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        """A slot always has a state, because zeros mean no past."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Conv state [rows, channels, kernel]; a single-token step updates it in place."""
        self._conv_rows = self._conv[layer_idx][self._rows]
        return self._conv_rows

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Recurrent state [rows, heads, key, value]."""
        return self._recurrent[layer_idx][self._rows]

    def is_recording_past(self, layer_idx: int) -> bool:
        """No speculative roll-back is kept."""
        return False

    def update_conv_state(self, values: Tensor, layer_idx: int, conv_kernel_size: int = 0, **_: Any) -> Tensor:
        """Append values [rows, channels, L] to the state; returns past and new values together."""
        assert self._conv_rows is not None
        full = torch.cat([self._conv_rows, values], -1)
        self._conv_rows = full[..., -conv_kernel_size:]
        return full

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> None:
        """Write both states of the chosen slots back."""
        assert self._conv_rows is not None
        self._recurrent[layer_idx][self._rows] = state.to(self._recurrent[layer_idx].dtype)
        self._conv[layer_idx][self._rows] = self._conv_rows

    def tensors(self) -> list[Tensor]:
        """All state tensors, slot axis first."""
        return [*self._conv.values(), *self._recurrent.values()]

    def copy(self, source: int, targets: Tensor) -> None:
        """Copy one slot's states into others."""
        for tensor in self.tensors():
            tensor[targets] = tensor[source].clone()

    def clear(self, rows: Tensor) -> None:
        """Forget the past of some slots."""
        for tensor in self.tensors():
            tensor[rows] = 0

    def grow(self, slots: int) -> None:
        """Make room for more slots, keeping what is there."""
        for table in (self._conv, self._recurrent):
            for layer, tensor in table.items():
                bigger = tensor.new_zeros(slots + SCRATCH, *tensor.shape[1:])
                bigger[: self.slots] = tensor[: self.slots]
                table[layer] = bigger
        self.slots = slots


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a stateful mixer that this file knows how to pack."""
    return type(module).__name__.endswith("GatedDeltaNet") and hasattr(module, "layer_idx")


def wrap_recurrent_layers(model: nn.Module) -> int:
    """Make every gated delta net follow the call's plan; returns how many there are."""
    wrapped = 0
    for module in model.modules():
        if is_recurrent(module):
            _wrap(module)
            wrapped += 1
    return wrapped


def _wrap(module: nn.Module) -> None:
    original: Forward = module.forward

    def forward(hidden_states: Tensor, *args: Any, areno: RecurrentPlan | None = None, **kwargs: Any) -> Tensor:
        if areno is None:
            return original(hidden_states, *args, **kwargs)
        return areno.run_recurrent(module, original, hidden_states[0])[None]

    module.forward = forward  # type: ignore[method-assign,assignment]
