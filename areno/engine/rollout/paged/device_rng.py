"""Drawing without a host: the generator of ``counter_rng`` in tensors.

Nothing here reads a tensor's value, so a graph can capture it. Seeds and counters travel as int64; its arithmetic wraps
around like that of unsigned numbers, and only the right shift has to be made logical by a mask.
"""

from __future__ import annotations

from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """Numbers in [0, 1), float64 [N], bit for bit those of :func:`~areno.engine.rollout.counter_rng.uniforms`.

    Args:
        seeds: int64 [N]; the lowest 64 bits of the sample's seed.
        counters: int64 [N]; index of the token to draw.
    """
    key = _mix(seeds + _GOLDEN)
    return _shifted(_mix(key + _GOLDEN * (counters + 1)), 11).double() * 2.0**-53


def as_int64(seed: int) -> int:
    """The number whose 64 bits are the lowest ones of ``seed``."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - 2**64 if low >= 2**63 else low
