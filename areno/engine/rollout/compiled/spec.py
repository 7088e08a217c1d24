"""What a compiled decode step depends on: its name on disk, and all that the building process needs to know."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from areno import __version__
from areno.cache_folder import cache_folder
from areno.engine.kernels import decode_attention, plain_draw, row_product
from areno.engine.kernels.library import processor
from areno.engine.model import attention, causal_lm, linear, packed_model
from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout import inverse_cdf, kv_cache
from areno.engine.rollout.compiled import traced
from areno.engine.rollout.kv_cache import LayerShape

CACHE_KIND = "decode_steps"
# Entries of a configuration that say where a model came from, not what it computes.
_ORIGIN = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A decode step, weights left out."""

    config: str  # the model's configuration as JSON
    architecture: str  # name of its class
    attention: str  # name of areno's attention function in ``transformers``
    dtype: str  # of weights and cache, as ``torch`` names it
    layers: tuple[LayerShape, ...]  # what is cached

    @classmethod
    def of(cls, model: CausalLM, layers: tuple[LayerShape, ...]) -> StepSpec:
        """The step of a loaded model."""
        config = {key: value for key, value in model.config.to_dict().items() if key not in _ORIGIN}
        return cls(
            config=json.dumps(config, sort_keys=True, default=str),
            architecture=type(model.module).__name__,
            attention=str(model.config._attn_implementation),
            dtype=str(model.dtype).removeprefix("torch."),
            layers=layers,
        )

    def path(self) -> Path:
        """Where its package lies, or will lie."""
        parts = [json.dumps(asdict(self), sort_keys=True), torch.__version__, transformers.__version__, __version__]
        parts += [Path(str(m.__file__)).read_text(encoding="utf-8") for m in _TRACED_SOURCES]
        # A step calls our kernels by their names.
        parts += [kernel.path().name for kernel in KERNELS]
        digest = hashlib.sha256("\0".join([*parts, processor()]).encode()).hexdigest()
        return cache_folder(CACHE_KIND) / f"{digest[:32]}.pt2"


# Our kernels; a step takes all of them, or where one cannot be built PyTorch's operators.
_KERNEL_MODULES = (decode_attention, row_product, plain_draw)
KERNELS = tuple(module.KERNEL for module in _KERNEL_MODULES)
_TRACED_SOURCES = (traced, kv_cache, inverse_cdf, attention, causal_lm, linear, packed_model, *_KERNEL_MODULES)
