"""The LoRA adapter of a model (Hu et al. 2021, arXiv:2106.09685): small trainable matrices added to frozen weights.

:mod:`areno.engine.model.attach_adapter` attaches adapters with ``peft``.

In training, the adapter is a separate branch of each frozen layer. For rollouts in fp32 on a CPU, the adapter is merged into
the weights, so a decode step costs the same as without an adapter. The weights are merged when generation begins. The original
weights are restored when generation has ended.

Merged bf16 weights would lose small updates to rounding, and 4-bit weights cannot store the merged values. In rollouts with
bf16 or 4-bit weights, and in all rollouts on GPUs, the adapter is therefore a separate branch.

The reference policy is normally the base model. While the adapter is disabled, the adapted model computes the outputs of the
base model, so no second model is needed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from areno.config.packages import require_packages
from areno.config.train_options import ALL_LINEAR
from areno.errors import UsageError

# peft's default adapter name, so that saved adapters load anywhere.
NAME = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Options of a trainable adapter."""

    rank: int = 0
    alpha: float | None = None  # the output is scaled by alpha / rank; None: twice the rank
    dropout: float = 0.0  # dropout rate of the adapter's inputs in training
    target_modules: str | Sequence[str] = ALL_LINEAR  # ``all-linear``, or layer names as a list or comma-separated
    adapter_path: str | None = None  # adapter whose training is continued; it sets rank, alpha and layers
    load_in_4bit: bool = False
    seed: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any], owner: str) -> AdapterOptions:
        """Create the options from a mapping of option names to values.

        Raises UsageError: a key is unknown, ``rank`` and ``adapter_path`` are both missing, or a required package is not
        installed.
        """
        keys = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(values) - keys):
            raise UsageError(f"{owner} has no key {', '.join(unknown)}; its keys are {', '.join(sorted(keys))}")
        options = cls(**values)
        if options.rank < 1 and options.adapter_path is None:
            raise UsageError(
                f"{owner} rank={options.rank}: a new adapter needs a rank of at least 1; set rank, or set adapter_path to "
                "continue the training of a saved adapter"
            )
        require_packages("qlora" if options.load_in_4bit else "lora", "LoRA needs")
        return options

    @property
    def targets(self) -> str | list[str]:
        """Names of the layers that get an adapter, in the form that ``peft`` expects."""
        if self.target_modules == ALL_LINEAR:
            return ALL_LINEAR
        names = self.target_modules.split(",") if isinstance(self.target_modules, str) else self.target_modules
        return [name.strip() for name in names]


class Adapter:
    """The LoRA adapter of a module that ``peft`` has wrapped. ``may_merge`` allows rollouts with merged weights."""

    def __init__(self, wrapped: Any, *, may_merge: bool) -> None:
        self._wrapped = wrapped
        self._layers = adapted_layers(wrapped)
        self._base: list[Callable[[], None]] = []
        self._changing = threading.Lock()
        self.merges = may_merge and _is_plain(wrapped, self._layers)

    @property
    def rank(self) -> int:
        """Rank of the adapter."""
        return int(self._wrapped.peft_config[NAME].r)

    @property
    def layers(self) -> int:
        """Number of adapted layers."""
        return len(self._layers)

    @property
    def merged_bytes(self) -> int:
        """Size in bytes of the merged weights, which are stored in addition to the original weights; 0 if merging is off."""
        weights = [layer.get_base_layer().weight for layer in self._layers] if self.merges else []
        return sum(weight.numel() * weight.element_size() for weight in weights)

    @property
    def merged(self) -> bool:
        """Whether the module currently uses merged weights."""
        return bool(self._base)

    @torch.no_grad()
    def merge(self) -> None:
        """Replace the weight of each adapted layer with its merged weight. If :attr:`merges` is False, do nothing.

        The original weights are kept, so that :meth:`unmerge` can restore them.
        """
        with self._changing:
            if self._base or not self.merges:
                return
            for layer in self._layers:
                self._base.append(self.put(layer, self.sum_of(layer)))
                layer.merged_adapters.append(NAME)

    def put(self, layer: Any, weight: Tensor) -> Callable[[], None]:
        """Replace the weight of an adapted layer, and return a function that restores the original weight."""
        parameter = cast(nn.Parameter, layer.get_base_layer().weight)
        before, parameter.data = parameter.data, weight
        return functools.partial(setattr, parameter, "data", before)

    def sum_of(self, layer: Any) -> Tensor:
        """Return an adapted layer's weight plus its LoRA update, scale * B @ A. The adapter must be unmerged."""
        return layer.get_base_layer().weight.data + layer.get_delta_weight(NAME)

    def unmerge(self) -> None:
        """Restore the original weights exactly, and free the merged weights."""
        with self._changing:
            for layer in self._layers if self._base else ():
                layer.merged_adapters.clear()
            for restore in self._base:
                restore()
            self._base = []

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Unmerge a merged adapter while the ``with`` block changes the weights, and merge the adapter again afterwards."""
        merged = self.merged
        self.unmerge()
        yield
        merged |= self.merged  # a request may have merged half-updated weights in the meantime
        self.unmerge()
        if merged:
            self.merge()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapter within the ``with`` block, so that the module computes the base model's outputs."""
        self.unmerge()
        with self._wrapped.disable_adapter():
            yield

    def partial_names(self) -> set[str]:
        """Return the names of the replicated parameters for which each rank computes only a part of the gradient."""
        return set()

    def state(self) -> dict[str, Tensor] | None:
        """Gather the shards of the adapter's tensors, and return the full tensors. All ranks must call this method.

        If no tensor is sharded, return None, because the module itself holds the full tensors.
        """
        trained = {name: p for name, p in self._wrapped.named_parameters() if p.requires_grad}
        if not any(hasattr(p, "placements") for p in trained.values()):
            return None
        from areno.engine.parallel.parts import local, unsharded  # slow import (1 s), rarely needed

        return {name: unsharded(local(p.detach()), p) for name, p in trained.items()}

    def save(self, folder: str | Path, *, writes: bool = True) -> None:
        """Write the adapter's files. All ranks must call this method; the ranks on which ``writes`` is true write the files."""
        state = self.state()
        if not writes:
            return
        self._wrapped.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
        (Path(folder) / "README.md").unlink(missing_ok=True)  # an empty model card template


def adapted_layers(wrapped: nn.Module) -> list[Any]:
    """Return the layers of a module that have an adapter."""
    from peft.tuners.lora import LoraLayer

    return [layer for layer in wrapped.modules() if isinstance(layer, LoraLayer)]


def _is_plain(wrapped: nn.Module, layers: Sequence[Any]) -> bool:
    """Return whether all trainable parameters are LoRA matrices that can be merged into the weights of their layers."""
    from peft.tuners.lora import Linear

    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    only_pairs = all(name.endswith((f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight")) for name in trained)
    return only_pairs and all(type(layer) is Linear for layer in layers)
