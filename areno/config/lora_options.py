"""Options of the group LoRA: training a small adapter beside frozen weights, which may be held in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from areno.config.options import option

_lora = partial(option, group="LoRA")

ALL_LINEAR = "all-linear"
"""What ``--lora-target-modules`` calls every linear layer of the body."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The adapter that is trained in place of the weights."""

    lora_rank: int = _lora(
        0,
        minimum=0,
        help="Train a LoRA adapter of this rank, and leave the weights as they are; 0 trains the weights themselves.",
    )
    lora_alpha: float | None = _lora(
        None, above=0, unset="twice --lora-rank", help="The adapter's output is scaled by alpha / rank."
    )
    lora_dropout: float = _lora(
        0.0,
        minimum=0,
        below=1,
        help="Share of the adapter's inputs that a training pass drops. Only for algorithms that generate nothing: a "
        "rollout drops nothing, so the importance ratio would be noise.",
    )
    lora_target_modules: str = _lora(
        ALL_LINEAR,
        metavar="NAME[,NAME...]",
        help="Linear layers that get an adapter, by the end of their name; all-linear takes all but the output head.",
    )
    lora_adapter_path: str | None = _lora(
        None,
        path="place",
        metavar="PATH",
        unset="a new adapter",
        help="Start from this PEFT adapter of --ckpt, with the rank, alpha and layers that it has.",
    )
    load_in_4bit: bool = _lora(
        False, help="Hold the frozen weights in 4 bits (QLoRA: nf4, double quantisation, by bitsandbytes)."
    )

    @property
    def uses_lora(self) -> bool:
        """Whether an adapter is trained."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
