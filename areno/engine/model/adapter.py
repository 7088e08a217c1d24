"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685), by ``peft``: small trained matrices beside frozen weights.

One module serves four purposes. Training runs the adapter beside each frozen layer. A rollout in fp32 on a CPU runs on the
sum of both, so that a decode step costs what it costs without an adapter: the sum is made when generation begins, the
module points at it, and points back at the untouched weights afterwards. In bf16 that sum would round small updates away,
and a 4-bit base has no place for it: there the adapter runs beside its layer in rollouts too. With the adapter off, the
same module is the reference policy.
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
from areno.config.update_options import ALL_LINEAR
from areno.errors import UsageError

# The name that peft gives an adapter unless told otherwise, so that what is saved loads anywhere.
NAME = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """What kind of adapter is trained."""

    rank: int = 0
    alpha: float | None = None  # its output is scaled by alpha / rank; None is twice the rank
    dropout: float = 0.0  # share of the adapter's inputs that a training pass drops
    target_modules: str | Sequence[str] = ALL_LINEAR  # ``all-linear``, or names of linear layers, listed or with commas
    adapter_path: str | None = None  # folder of an adapter to go on with; rank, alpha and layers are then its own
    load_in_4bit: bool = False
    seed: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any], owner: str) -> AdapterOptions:
        """Make options from a dictionary.

        Raises UsageError: a key is unknown, neither rank nor adapter is given, or a package is missing.
        """
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UsageError(f"{owner} has no key {', '.join(unknown)}; known keys: {', '.join(sorted(known))}")
        options = cls(**values)
        if options.rank < 1 and options.adapter_path is None:
            raise UsageError(f"{owner} rank={options.rank}: give a rank of at least 1, or adapter_path")
        require_packages("qlora" if options.load_in_4bit else "lora", "LoRA needs")
        return options

    @property
    def targets(self) -> str | list[str]:
        """As ``peft`` takes them."""
        if self.target_modules == ALL_LINEAR:
            return ALL_LINEAR
        names = self.target_modules.split(",") if isinstance(self.target_modules, str) else self.target_modules
        return [name.strip() for name in names]


class Adapter:
    """The adapter of a module, as wrapped by ``peft``; with ``may_merge`` rollouts may run on the sum of weights and it."""

    def __init__(self, wrapped: Any, *, may_merge: bool) -> None:
        self._wrapped = wrapped
        self._layers = adapted_layers(wrapped)
        self._base: list[Callable[[], None]] = []
        self._changing = threading.Lock()
        self.merges = may_merge and _is_plain(wrapped, self._layers)

    @property
    def rank(self) -> int:
        """Its rank."""
        return int(self._wrapped.peft_config[NAME].r)

    @property
    def layers(self) -> int:
        """How many layers it belongs to."""
        return len(self._layers)

    @property
    def merged_bytes(self) -> int:
        """What the sum of weights and adapter takes beside the weights, while there is one."""
        weights = [layer.get_base_layer().weight for layer in self._layers] if self.merges else []
        return sum(weight.numel() * weight.element_size() for weight in weights)

    @property
    def merged(self) -> bool:
        """Whether the module computes with the sum of weights and adapter."""
        return bool(self._base)

    @torch.no_grad()
    def merge(self) -> None:
        """Let the module compute with the sum of weights and adapter, where that is sound; a second call does nothing.

        The weights themselves are kept aside, untouched: for this long the layers are in memory twice.
        """
        with self._changing:
            if self._base or not self.merges:
                return
            for layer in self._layers:
                self._base.append(self.put(layer, self.sum_of(layer)))
                layer.merged_adapters.append(NAME)

    def put(self, layer: Any, weight: Tensor) -> Callable[[], None]:
        """Let a layer that has an adapter multiply with another weight; returns what puts its own back."""
        own = cast(nn.Parameter, layer.get_base_layer().weight)
        before, own.data = own.data, weight
        return functools.partial(setattr, own, "data", before)

    def sum_of(self, layer: Any) -> Tensor:
        """Weight plus adapter of a layer that has one, while they are apart."""
        return layer.get_base_layer().weight.data + layer.get_delta_weight(NAME)

    def unmerge(self) -> None:
        """Point back at the weights as they were, bit for bit, and drop the sum."""
        with self._changing:
            for layer in self._layers if self._base else ():
                layer.merged_adapters.clear()
            for put_back in self._base:
                put_back()
            self._base = []

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Weights and adapter apart while the block changes them; where they were added up, the new ones are afterwards."""
        merged = self.merged
        self.unmerge()
        yield
        merged |= self.merged  # a request that came in the meantime has added up what was half changed
        self.unmerge()
        if merged:
            self.merge()

    @contextmanager
    def off(self) -> Iterator[None]:
        """The module without its adapter: the model that it was made for."""
        self.unmerge()
        with self._wrapped.disable_adapter():
            yield

    def partial_names(self) -> set[str]:
        """Parameters that each rank holds whole but sees only a part of the gradient of."""
        return set()

    def state(self) -> dict[str, Tensor] | None:
        """The whole tensors to be saved, where they are not simply the module's; every rank must call."""
        trained = {name: p for name, p in self._wrapped.named_parameters() if p.requires_grad}
        if not any(hasattr(p, "placements") for p in trained.values()):
            return None
        from areno.engine.parallel.parts import local, unsharded  # costs a second to import, and few need it

        return {name: unsharded(local(p.detach()), p) for name, p in trained.items()}

    def save(self, folder: str | Path, *, writes: bool = True) -> None:
        """Write ``adapter_config.json`` and ``adapter_model.safetensors`` if this rank ``writes``; all ranks must call."""
        state = self.state()
        if not writes:
            return
        self._wrapped.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
        (Path(folder) / "README.md").unlink(missing_ok=True)  # an empty form for a model card


def adapted_layers(wrapped: nn.Module) -> list[Any]:
    """The layers of a module that an adapter belongs to."""
    from peft.tuners.lora import LoraLayer

    return [layer for layer in wrapped.modules() if isinstance(layer, LoraLayer)]


def _is_plain(wrapped: nn.Module, layers: Sequence[Any]) -> bool:
    """Whether weights plus adapter is one matrix per layer, and nothing else of the model is trained."""
    from peft.tuners.lora import Linear

    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    only_pairs = all(".lora_A." in name or ".lora_B." in name for name in trained)
    return only_pairs and all(type(layer) is Linear for layer in layers)
