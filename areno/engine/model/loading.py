"""Loading a checkpoint as a policy, and the proof at load time that the engine computes what the model means.

The proof runs two short random sequences through the stock ``eager`` attention, each alone, and through areno's plan,
packed. A model whose layers ignore the plan (an unknown recurrent mixer, an attention of its own) fails here by name
instead of training on leaking sequences.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from areno.engine.model.attention import IMPLEMENTATIONS
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.packing import PackedPlan
from areno.engine.model.recurrent import wrap_recurrent_layers
from areno.errors import UnsupportedModelError, UsageError

logger = logging.getLogger(__name__)

_PROBE_LENGTHS = (7, 12)
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


def probe_tolerance(dtype: torch.dtype) -> float:
    """Largest difference of logits relative to their largest entry; rounding stays two orders of magnitude below."""
    return _PROBE_TOLERANCE.get(dtype, 1e-1)


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    dummy: bool = False,
    attn_backend: str = "flash",
) -> CausalLM:
    """Load a causal LM from a folder or hub id, ready for packed calls.

    Args:
        path: checkpoint folder or Hugging Face repo id.
        dtype: type of the weights in memory.
        device: where they go.
        trust_remote_code: allow code that the checkpoint ships.
        dummy: build the architecture with random weights and read only the configuration.
        attn_backend: ``flash`` uses PyTorch's fused attention, ``native`` writes the scores out.

    Raises:
        UsageError: the checkpoint cannot be read.
        UnsupportedModelError: its architecture does not follow an attention plan; the message says how that showed.
    """
    module = _build(path, dtype, trust_remote_code, dummy).to(device)
    return prepare(module, path, attn_backend)


def prepare(module: nn.Module, name: str = "model", attn_backend: str = "flash") -> CausalLM:
    """Wrap a loaded ``transformers`` module: plan-driven attention, no dropout, proven on two sequences."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0  # rollout never drops, so training must not either: the importance ratio would be noise
    module.eval()
    _repair_generation_config(module)
    expected = _stock_logits(module)
    wrap_recurrent_layers(module)
    _use_areno_attention(module, name, attn_backend)
    model = CausalLM(module)
    _prove(model, expected, name)
    return model


def _build(path: str, dtype: torch.dtype, trust_remote_code: bool, dummy: bool) -> nn.Module:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        if dummy:
            config = AutoConfig.from_pretrained(path, **options)
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager", **options)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager", **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        where = "folder" if Path(path).exists() else "hub id"
        raise UsageError(
            f"--ckpt {path}: this {where} could not be loaded as a causal language model: {_first_lines(error)}"
        ) from error


def _first_lines(error: Exception, limit: int = 400) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}{'…' if len(text) > limit else ''}"


def _use_areno_attention(module: nn.Module, name: str, attn_backend: str) -> None:
    try:
        module.set_attn_implementation(IMPLEMENTATIONS[attn_backend])  # type: ignore[operator]
    except (ValueError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{name}: {type(module).__name__} does not take a registered attention function ({_first_lines(error)}); "
            "areno runs the transformers causal LMs that do"
        ) from error


def _repair_generation_config(module: Any) -> None:
    """Some published checkpoints set a temperature without sampling, which transformers then refuses to save."""
    config = getattr(module, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True


def _probe_tokens(module: nn.Module) -> list[Tensor]:
    vocab = int(module.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
    generator = torch.Generator().manual_seed(0)
    device = next(module.parameters()).device
    return [torch.randint(0, vocab, (n,), generator=generator).to(device) for n in _PROBE_LENGTHS]


@torch.no_grad()
def _stock_logits(module: nn.Module) -> Tensor:
    return torch.cat([module(input_ids=ids[None], use_cache=False).logits[0] for ids in _probe_tokens(module)]).float()


@torch.no_grad()
def _prove(model: CausalLM, expected: Tensor, name: str) -> None:
    tokens = _probe_tokens(model.module)
    plan = PackedPlan([len(ids) for ids in tokens], model.device)
    try:
        got = model.logits(model.body(torch.cat(tokens), plan.position_ids, plan)).float()
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{name}: {type(model.module).__name__} cannot run packed sequences ({_first_lines(error)})"
        ) from error
    scale = expected.abs().max().clamp(min=1e-6)
    gap = float((got - expected).abs().max() / scale)
    if not gap <= probe_tolerance(model.dtype):
        raise UnsupportedModelError(
            f"{name}: packed sequences of {type(model.module).__name__} differ from the same sequences alone "
            f"(relative gap {gap:.1e}), so a layer ignores the attention plan; this architecture is not supported"
        )
    logger.debug("packed-against-alone probe of %s: relative gap %.1e", name, gap)
