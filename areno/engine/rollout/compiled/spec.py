"""Cache key and file name of a compiled decode step. The key covers everything on which the step depends."""

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
from areno.engine.rollout import inverse_cdf, slot_cache
from areno.engine.rollout.compiled import traced
from areno.engine.rollout.slot_cache import LayerShape

CACHE_KIND = "decode_steps"
# Configuration keys that do not affect what the model computes.
_ORIGIN = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The model properties that determine the code of a compiled decode step."""

    config: str  # the model's configuration as JSON
    architecture: str  # name of the model's class
    attention: str  # name of areno's attention function in ``transformers``
    dtype: str  # torch name of the dtype of weights and cache
    layers: tuple[LayerShape, ...]  # cache layout

    @classmethod
    def of(cls, model: CausalLM, layers: tuple[LayerShape, ...]) -> StepSpec:
        """Return the spec of a loaded model's decode step."""
        config = {key: value for key, value in model.config.to_dict().items() if key not in _ORIGIN}
        return cls(
            config=json.dumps(config, sort_keys=True, default=str),
            architecture=type(model.module).__name__,
            attention=str(model.config._attn_implementation),
            dtype=str(model.dtype).removeprefix("torch."),
            layers=layers,
        )

    def path(self) -> Path:
        """Return the path of the file with the compiled decode step. The file may not exist yet."""
        parts = [json.dumps(asdict(self), sort_keys=True), torch.__version__, transformers.__version__, __version__]
        parts += [Path(str(m.__file__)).read_text(encoding="utf-8") for m in _TRACED_SOURCES]
        # A package that was compiled with other kernels is not reused.
        parts += [kernel.path().name for kernel in KERNELS]
        digest = hashlib.sha256("\0".join([*parts, processor()]).encode()).hexdigest()
        return cache_folder(CACHE_KIND) / f"{digest[:32]}.pt2"


# areno's kernels: a step uses all of them, or none if one of them cannot be built.
_KERNEL_MODULES = (decode_attention, row_product, plain_draw)
KERNELS = tuple(module.KERNEL for module in _KERNEL_MODULES)
_TRACED_SOURCES = (traced, slot_cache, inverse_cdf, attention, causal_lm, linear, packed_model, *_KERNEL_MODULES)
