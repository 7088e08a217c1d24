"""Validates that areno runs a loaded model correctly.

The model first processes two short random sequences one at a time, with its own ``eager`` attention. The model then processes
both sequences in one packed pass, with areno's attention plan. The results must agree up to rounding errors. Rounding can
change a router's choice between nearly equal scores, so the packed pass uses the experts that the individual passes chose.

If a layer ignores the attention plan, one packed sequence affects the results of the other sequence. Examples of such
layers are unknown recurrent layers and custom attention layers. Models with layers that ignore the plan are rejected.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan
from areno.engine.model.routing import ChoiceRecorder, ChoiceReplay
from areno.engine.model.stages import StageLayers
from areno.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=PackedModel)

PROBE_LENGTHS = (7, 12)
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


def probe_tolerance(dtype: torch.dtype) -> float:
    """Return the accepted difference between two computations of the same logits or hidden states.

    The difference is relative to the maximum absolute value. Rounding errors are smaller.
    """
    return _PROBE_TOLERANCE.get(dtype, 1e-1)


def probe_inputs(module: Any, stage: StageLayers | None) -> list[Tensor]:
    """Return two random input sequences for a forward pass of ``module``. The sequences differ in their length n.

    If ``stage`` is the first stage or None (no pipeline), each sequence is a tensor of token ids [n]. For later stages, each
    sequence is a tensor of hidden states [n, C].
    """
    config, like = module.config.get_text_config(), next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    if stage is None or stage.first:
        tokens = [torch.randint(0, int(config.vocab_size), (n,), generator=generator) for n in PROBE_LENGTHS]
        return [ids.to(like.device) for ids in tokens]
    return [torch.randn(n, int(config.hidden_size), generator=generator).to(like) for n in PROBE_LENGTHS]


def run_individually(
    stock: Callable[[dict[str, Tensor]], Tensor], probe: list[Tensor]
) -> tuple[Tensor, list[ChoiceRecorder]]:
    """Process each sequence of ``probe`` alone. Return the concatenated results, and the expert choices of each pass."""
    kind = "inputs_embeds" if probe[0].is_floating_point() else "input_ids"
    choices, outputs = [ChoiceRecorder() for _ in probe], []
    for sequence, choice in zip(probe, choices, strict=True):
        with torch.no_grad(), choice:
            outputs.append(stock({kind: sequence[None]})[0])
    return torch.cat(outputs).float(), choices


@torch.no_grad()
def validate(
    model: M,
    ours: Callable[[M, Tensor], Tensor],
    tokens: list[Tensor],
    expected: Tensor,
    choices: list[ChoiceRecorder],
    name: str,
    unsupported: str,
) -> None:
    """Process the sequences in one packed pass, and compare the results with ``expected``.

    Raises UnsupportedModelError: the packed pass fails, or the results differ. If the results differ,
    ``unsupported`` is the end of the error message.
    """
    kind = type(model.module).__name__
    plan = PackedPlan([len(ids) for ids in tokens], model.device)
    try:
        with ChoiceReplay(*choices, tolerance=probe_tolerance(model.dtype)):
            actual = ours(model, model.body(torch.cat(tokens), plan.position_ids, plan)).float()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{name}: {kind} cannot process packed sequences ({first_lines(error)}); use another model"
        ) from error
    scale = expected.abs().max().clamp(min=1e-6)
    gap = float((actual - expected).abs().max() / scale)
    if not gap <= probe_tolerance(model.dtype):
        raise UnsupportedModelError(
            f"{name}: {kind} computes different results for packed sequences than for individual sequences (relative "
            f"difference {gap:.1e}), so {unsupported}"
        )
    logger.debug("%s: results for packed and for individual sequences differ by %.1e (relative difference)", name, gap)


def broken_weights(module: nn.Module, name: str) -> str:
    """Return the error message for a model that computes non-finite numbers."""
    broken = [key for key, weights in module.named_parameters() if not weights.isfinite().all()]
    if not broken:
        kind = str(next(module.parameters()).dtype).removeprefix("torch.")
        remedy = "use another checkpoint" if kind == "float32" else "use --dtype float32"
        return f"{name}: the model computes non-finite numbers in {kind}; {remedy}"
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    return (
        f"{name}: weights are not finite: {', '.join(broken[:3])}{more}; use an earlier checkpoint, or "
        "download this checkpoint again"
    )


def first_lines(error: Exception, limit: int = 400) -> str:
    """Return the type of an error and the beginning of its message, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}{'…' if len(text) > limit else ''}"
