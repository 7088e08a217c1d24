"""AdamW with 8-bit moments, stored with block-wise dynamic quantization (Dettmers et al. 2022, arXiv:2110.02861).

Each block of 256 numbers has one fp32 scale: the number with the largest absolute value in the block, with its sign. A
table maps the 256 codes to factors between -1 and 1, or between 0 and 1 for the second moment. Each number is divided
by the scale of its block, and stored as the code of the nearest factor. The relative spacing of the factors is finest
near 1, and the smallest positive factor is below 1e-6. Three features distinguish this module from other
implementations.

*The square root of the second moment is stored*, not the moment itself. A positive root is never rounded to 0. With a
root of 0, AdamW would divide a nonzero first moment by epsilon alone. The root spans half as many decades as the second
moment. AdamW's denominator for a weight is therefore accurate enough even if the weight's gradients are a thousandth of
the largest gradients in the block.

*A table lookup finds the code of a number.* The upper half of an fp32 number (sign, exponent and seven bits of the
mantissa) is the index into a second table. The lookup is several times faster than a binary search. The lower half can
be ignored, because it changes a number by less than the distance between two adjacent factors.

*Tensors are updated in chunks*, so that a step needs only 2.5 MiB of working memory on a CPU, and 160 MiB on a GPU.
Rounding uses no random numbers. A run that resumes with the same parallel layout (arrangement of the ranks) is
therefore bitwise identical to an uninterrupted run.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 256
# Smaller tensors (norms, biases) keep fp32 moments: they take little memory, and are the most sensitive to rounding.
LEAST_QUANTISED = 4096
# Numbers per chunk: as many as a core's cache holds; on an accelerator, enough to occupy it.
_CHUNK = {"cpu": 1 << 16}
_CHUNK_ELSEWHERE = 1 << 22
_DECADES = 7


@functools.cache
def dynamic_values(signed: bool) -> Tensor:
    """Return the factor that each 8-bit code stands for, as fp32 [256] in ascending order.

    A quantized number is the product of its factor and the scale of its block. If ``signed`` is true, the factors are
    between -1 and 1, otherwise between 0 and 1. The factors cover seven decades (powers of ten), and are evenly spaced
    within each decade. Each decade has half as many factors as the next higher decade.
    """
    levels = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        values = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)).tolist()
        levels += values + ([-value for value in values] if signed else [])
    return torch.tensor(sorted(levels), dtype=torch.float64).float()


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables for decoding and encoding.

    To decode a number, look up its code in the first table [256], and multiply the result by the scale of the number's
    block. To encode a number, divide it by the scale of its block. The upper 16 bits of the fp32 quotient are the index of
    the code in the second table [65536].
    """
    values = dynamic_values(signed)
    halves = torch.arange(1 << 16, dtype=torch.int64)
    bits = (halves << 16) + (1 << 15)  # the middle of the numbers with this upper half
    numbers = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int().view(torch.float32)
    codes = torch.bucketize(numbers.nan_to_num(nan=0.0), (values[1:] + values[:-1]) / 2)
    if not signed:
        codes = torch.where(halves > 0, codes.clamp(min=1), codes)
    return values.to(device), codes.to(torch.uint8).to(device)


class Quantised:
    """Quantized numbers, stored as codes (uint8 [blocks, 256]) and scales (fp32 [blocks]).

    Each code stands for a factor; see :func:`dynamic_values`. A number is the product of its factor and the scale of its
    block. The scale of a block is the number with the largest absolute value in the block, including the sign of this
    number. The sign is necessary, because there is a code for the factor 1 but none for -1.
    """

    def __init__(self, codes: Tensor, scales: Tensor, signed: bool) -> None:
        self.codes, self.scales, self.signed = codes, scales, signed

    @classmethod
    def zeros(cls, count: int, device: torch.device, signed: bool) -> Quantised:
        """Create ``count`` zeros, padded to whole blocks."""
        blocks = -(-count // BLOCK)
        zero = int((dynamic_values(signed) == 0).nonzero())
        codes = torch.full((blocks, BLOCK), zero, dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(blocks, device=device), signed)

    @classmethod
    def of(cls, numbers: Tensor, signed: bool) -> Quantised:
        """Quantize ``numbers``, fp32 [N].

        Quantizing the decoded numbers again gives the same codes.
        """
        made, size = cls.zeros(len(numbers), numbers.device, signed), _chunk(numbers.device)
        for begin in range(0, len(numbers), size):
            part = numbers[begin : begin + size]
            blocks = -(-len(part) // BLOCK)
            padded = nn.functional.pad(part, (0, blocks * BLOCK - len(part)))
            made.write(begin // BLOCK, begin // BLOCK + blocks, padded.view(blocks, BLOCK))
        return made

    def numbers(self, count: int) -> Tensor:
        """Decode the first ``count`` numbers to fp32 [count]."""
        decoded, size = torch.empty(count, device=self.codes.device), _chunk(self.codes.device)
        for begin in range(0, count, size):
            part = decoded[begin : begin + size]
            blocks = -(-len(part) // BLOCK)
            part.copy_(self.read(begin // BLOCK, begin // BLOCK + blocks).view(-1)[: len(part)])
        return decoded

    def read(self, first: int, last: int) -> Tensor:
        """Decode the blocks ``first`` to ``last - 1`` to fp32 [blocks, 256]."""
        values, _ = _tables(self.signed, self.codes.device)
        chosen = values.index_select(0, self.codes[first:last].view(-1).int())
        return chosen.view(-1, BLOCK).mul_(self.scales[first:last, None])

    def write(self, first: int, last: int, numbers: Tensor) -> None:
        """Quantize ``numbers``, fp32 [blocks, 256], and store them as the blocks ``first`` to ``last - 1``."""
        _, codes = _tables(self.signed, self.codes.device)
        scales = numbers.amax(1)
        if self.signed:
            least = numbers.amin(1)
            scales = torch.where(scales >= -least, scales, least)
        self.scales[first:last] = scales
        scaled = numbers / scales.masked_fill_(scales == 0, 1.0)[:, None]
        upper = (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        self.codes[first:last] = codes.index_select(0, upper.view(-1)).view(-1, BLOCK)


class LowPrecisionAdam(torch.optim.Optimizer, ABC):
    """Base class of replacements for :class:`torch.optim.AdamW` that store the moments in low precision.

    ``params`` contains contiguous fp32 tensors, or groups of them. The tensors are weights or master weights, either whole
    or as flat shards. The key ``quantised`` of a group states whether :class:`Adam8bit` stores the group's moments in
    8 bits. If ``quantised`` is None or missing, the size of each tensor determines the format of its moments.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "quantised": None}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, self.moments_of(parameter, group["quantised"]))

    @abstractmethod
    def moments_of(self, parameter: nn.Parameter, quantised: bool | None = None) -> dict[str, Any]:
        """Return a tensor's optimizer state: the step count and both moments. All of them are 0 before the first step."""

    @abstractmethod
    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Update a tensor and its state."""


class Adam8bit(LowPrecisionAdam):
    """AdamW with 8-bit moments."""

    def moments_of(self, parameter: nn.Parameter, quantised: bool | None = None) -> dict[str, Any]:
        """See :meth:`LowPrecisionAdam.moments_of`."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            if not (is_quantised(parameter.numel()) if quantised is None else quantised):
                state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            else:
                for name, signed in (("mean", True), ("root", False)):
                    moment = Quantised.zeros(parameter.numel(), parameter.device, signed)
                    state[f"{name}_codes"], state[f"{name}_scales"] = moment.codes, moment.scales
        return state

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] += 1
        if "mean" in state:
            move(parameter, gradient, state["mean"], state["square"], group, state["step"])
            return
        mean = Quantised(state["mean_codes"], state["mean_scales"], True)
        root = Quantised(state["root_codes"], state["root_scales"], False)
        weights, gradient = parameter.view(-1), gradient.reshape(-1)
        size = _chunk(parameter.device)
        for begin in range(0, weights.numel(), size):
            own = slice(begin, min(begin + size, weights.numel()))
            count = own.stop - begin
            first, last = begin // BLOCK, -(-own.stop // BLOCK)
            m, r = mean.read(first, last), root.read(first, last)
            v = r.square_().view(-1)
            move(weights[own], gradient[own], m.view(-1)[:count], v[:count], group, state["step"])
            mean.write(first, last, m)
            root.write(first, last, v.sqrt_().view(-1, BLOCK))


def move(w: Tensor, g: Tensor, m: Tensor, v: Tensor, group: dict[str, Any], step: int) -> None:
    """Apply one AdamW step with gradient ``g`` to weights ``w`` and moments ``m`` and ``v``, in place. All shapes are equal."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    w.mul_(1 - rate * group["weight_decay"])
    denominator = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    w.addcdiv_(m, denominator, value=-rate / (1 - beta1**step))


def is_quantised(count: int) -> bool:
    """Return whether a tensor of ``count`` entries is large enough for 8-bit moments."""
    return count >= LEAST_QUANTISED


def state_bytes(count: int, quantised: bool | None = None) -> int:
    """Return the total size in bytes of both moments of ``count`` entries.

    If ``quantised`` is None, :func:`is_quantised` determines the format of the moments.
    """
    if not (is_quantised(count) if quantised is None else quantised):
        return 8 * count
    return -(-count // BLOCK) * 2 * (BLOCK + 4)


def moment_kinds(quantised: bool) -> tuple[str, str]:
    """Return the names of both moments in a saved state. The second name is ``root`` for 8-bit moments, otherwise
    ``square``.
    """
    return ("mean", "root" if quantised else "square")


def moments_in(state: dict[str, Any], count: int) -> tuple[Tensor, Tensor]:
    """Return the moments of a tensor's state, each as fp32 [count].

    For 8-bit moments, the second tensor is the square root of the second moment, because the state stores the root.
    """
    if "mean" in state:
        return state["mean"].reshape(-1), state["square"].reshape(-1)
    mean = Quantised(state["mean_codes"], state["mean_scales"], True)
    root = Quantised(state["root_codes"], state["root_scales"], False)
    return mean.numbers(count), root.numbers(count)


def state_of(step: int, mean: Tensor, second: Tensor, quantised: bool) -> dict[str, Any]:
    """Create a tensor's optimizer state, with 8-bit moments if ``quantised`` is true, otherwise with fp32 moments.

    For 8-bit moments, ``second`` must be the square root of the second moment.
    """
    if not quantised:
        return {"step": step, "mean": mean, "square": second}
    state: dict[str, Any] = {"step": step}
    for name, numbers, signed in (("mean", mean, True), ("root", second, False)):
        moment = Quantised.of(numbers.reshape(-1), signed)
        state[f"{name}_codes"], state[f"{name}_scales"] = moment.codes, moment.scales
    return state


def working_bytes(device: torch.device) -> int:
    """Estimate the working memory of a step in bytes.

    A step updates each tensor in chunks. For each entry of a chunk, the step needs ten fp32 numbers.
    """
    return 40 * _chunk(device)


def _chunk(device: torch.device) -> int:
    return _CHUNK.get(device.type, _CHUNK_ELSEWHERE)
