"""Runs linear-attention layers (gated delta nets) over packed sequences.

A recurrent layer updates a state from token to token. With the ``forward`` of ``transformers``, the last state of one packed
sequence would be the first state of the next sequence. areno therefore wraps each layer's ``forward``.

In training, ``forward`` processes one padded row per sequence. Padding does not change the results, because padding follows the
tokens of a sequence, and the layers are causal. In rollouts, every cache slot has its own state. A prefill runs ``forward`` on
one sequence at a time, because padding would change the cached state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from areno.engine.model.attention import AttentionPlan, Forward

# Extra rows after the slots. Decode steps use them for padding, so that padding does not change the state of a sequence.
SCRATCH = 8


class SlotStates:
    """Convolution and recurrent states of the recurrent layers, with one row per cache slot. A row of zeros is an empty state.

    The class implements the cache methods of ``transformers`` that gated delta nets call. A layer's forward pass reads and
    updates the rows that :meth:`at` has selected.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._conv: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}
        self._rows = torch.zeros(0, dtype=torch.long)
        self._conv_rows: Tensor | None = None

    def at(self, module: Any, rows: Tensor) -> SlotStates:
        """Select the cache slots with the indices ``rows``. The next call of ``module`` reads and updates their states."""
        layer = module.layer_idx
        if layer not in self._conv:
            weight = module.conv1d.weight
            self._conv[layer] = weight.new_zeros(self.slots + SCRATCH, module.conv_dim, module.conv_kernel_size)
            self._recurrent[layer] = torch.zeros(
                self.slots + SCRATCH, module.num_v_heads, module.head_k_dim, module.head_v_dim, device=weight.device
            )
        self._rows, self._conv_rows = rows, None
        return self

    @property
    def layers(self) -> _Layers:
        """The convolution and recurrent states, indexed by layer, in the form that older ``transformers`` versions read."""
        return _Layers(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True, even before the first token, because each state is initialized to zeros, a valid empty state."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the convolution states [rows, channels, kernel]. A single-token step updates the returned tensor in place."""
        self._conv_rows = self._conv[layer_idx][self._rows]
        return self._conv_rows

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return a layer's recurrent states [rows, heads, key size, value size]."""
        return self._recurrent[layer_idx][self._rows]

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: past states are not recorded, because areno never returns to an earlier state."""
        return False

    def update_conv_state(self, values: Tensor, layer_idx: int, conv_kernel_size: int = 0, **_: Any) -> Tensor:
        """Append ``values`` [rows, channels, L] to the convolution states. Return the old and the new values, concatenated."""
        state = self.get_conv_state(layer_idx) if self._conv_rows is None else self._conv_rows
        full = torch.cat([state, values], -1)
        self._conv_rows = full[..., -conv_kernel_size:]
        return full

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> None:
        """Store the new recurrent states ``state`` in the slots that :meth:`at` selected.

        Also store the convolution states that the same forward pass has updated.
        """
        assert self._conv_rows is not None
        self._recurrent[layer_idx][self._rows] = state.to(self._recurrent[layer_idx].dtype)
        self._conv[layer_idx][self._rows] = self._conv_rows

    def tensors(self) -> list[Tensor]:
        """Return the state tensors of all layers. The first axis of each tensor is the slot."""
        return [*self._conv.values(), *self._recurrent.values()]

    def copy(self, source: int, targets: Tensor) -> None:
        """Copy the states of the slot ``source`` to the slots ``targets``."""
        for tensor in self.tensors():
            tensor[targets] = tensor[source].clone()

    def clear(self, rows: Tensor) -> None:
        """Reset the states of the slots ``rows`` to zero."""
        for tensor in self.tensors():
            tensor[rows] = 0

    def grow(self, slots: int) -> None:
        """Increase the number of slots to ``slots``, and keep the existing states."""
        for table in (self._conv, self._recurrent):
            for layer, tensor in table.items():
                bigger = tensor.new_zeros(slots + SCRATCH, *tensor.shape[1:])
                bigger[: self.slots] = tensor[: self.slots]
                table[layer] = bigger
        self.slots = slots


class _Layers:
    def __init__(self, states: SlotStates) -> None:
        self._states = states

    def __getitem__(self, layer_idx: int) -> _LayerStates:
        return _LayerStates(self._states, layer_idx)


class _LayerStates:
    record_past = False

    def __init__(self, states: SlotStates, layer_idx: int) -> None:
        self._states, self._layer_idx = states, layer_idx

    @property
    def conv_states(self) -> list[Tensor]:
        return [self._states.get_conv_state(self._layer_idx)]

    @property
    def recurrent_states(self) -> list[Tensor]:
        return [self._states.get_recurrent_state(self._layer_idx)]


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a recurrent layer that can run over packed sequences."""
    return type(module).__name__.endswith("GatedDeltaNet") and hasattr(module, "layer_idx")


def wrap_recurrent_layers(model: nn.Module) -> None:
    """Wrap the ``forward`` of every gated delta net of a model.

    If a call passes an attention plan (argument ``areno``), the wrapper runs the layer with the plan's ``run_recurrent``, which
    keeps the states of different sequences apart.
    """
    for module in filter(is_recurrent, model.modules()):
        _wrap(module)


def _wrap(module: nn.Module) -> None:
    original: Forward = module.forward

    def forward(hidden_states: Tensor, *args: Any, areno: AttentionPlan | None = None, **kwargs: Any) -> Tensor:
        if areno is None:
            return original(hidden_states, *args, **kwargs)
        return areno.run_recurrent(module, original, hidden_states[0])[None]

    module.forward = forward  # type: ignore[method-assign,assignment]
