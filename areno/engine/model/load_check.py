"""Validation that areno runs a loaded model correctly.

Two short random sequences run individually through the model's ``eager`` attention. Then they run packed, with areno's
attention plan. The results must agree. Rounding can change a router's choice between nearly equal scores, so the packed run
uses the experts that the individual runs chose.

If a layer ignores the plan (an unknown recurrent mixer or a custom attention), one packed sequence affects the results of
another. A model with such a layer is rejected.
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
    """Maximum difference of logits or hidden states, relative to the largest value. Rounding errors are much smaller."""
    return _PROBE_TOLERANCE.get(dtype, 1e-1)


def probe_inputs(module: Any, stage: StageLayers | None) -> list[Tensor]:
    """Two sequences of tokens [n] or, for later pipeline stages, of hidden states [n, C]."""
    config, like = module.config.get_text_config(), next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    if stage is None or stage.first:
        tokens = [torch.randint(0, int(config.vocab_size), (n,), generator=generator) for n in PROBE_LENGTHS]
        return [ids.to(like.device) for ids in tokens]
    return [torch.randn(n, int(config.hidden_size), generator=generator).to(like) for n in PROBE_LENGTHS]


def run_individually(
    stock: Callable[[dict[str, Tensor]], Tensor], probe: list[Tensor]
) -> tuple[Tensor, list[ChoiceRecorder]]:
    """Concatenated results of the sequences, each run alone, and the experts that each run chose."""
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
    """Run the sequences packed, and compare the results with ``expected``.

    Raises UnsupportedModelError: the packed sequences cannot run, or the results differ. ``unsupported`` is the reason for
    different results.
    """
    kind = type(model.module).__name__
    plan = PackedPlan([len(ids) for ids in tokens], model.device)
    try:
        with ChoiceReplay(*choices, tolerance=probe_tolerance(model.dtype)):
            actual = ours(model, model.body(torch.cat(tokens), plan.position_ids, plan)).float()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(f"{name}: {kind} cannot run packed sequences ({first_lines(error)})") from error
    scale = expected.abs().max().clamp(min=1e-6)
    gap = float((actual - expected).abs().max() / scale)
    if not gap <= probe_tolerance(model.dtype):
        raise UnsupportedModelError(
            f"{name}: packed sequences of {kind} differ from the same sequences run individually "
            f"(relative gap {gap:.1e}), so {unsupported}"
        )
    logger.debug("packed-versus-individual probe of %s: relative gap %.1e", name, gap)


def broken_weights(module: nn.Module, name: str) -> str:
    """The message for a model that computes non-finite numbers."""
    broken = [key for key, weights in module.named_parameters() if not weights.isfinite().all()]
    if not broken:
        kind = str(next(module.parameters()).dtype).removeprefix("torch.")
        remedy = "use another checkpoint" if kind == "float32" else "use --dtype float32"
        return f"{name}: the model computes non-finite numbers in {kind}; {remedy}"
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    return (
        f"{name}: weights are not finite: {', '.join(broken[:3])}{more}; use an earlier checkpoint, or "
        "download this one again"
    )


def first_lines(error: Exception, limit: int = 400) -> str:
    """The type and the first characters of an error, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}{'…' if len(text) > limit else ''}"
