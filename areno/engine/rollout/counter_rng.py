"""Counter-based random numbers, which are a stateless function of seed and counter.

The arithmetic is int64, which wraps around like uint64. A mask makes the right shift logical. The same code works on NumPy
arrays and tensors. It reads no tensor values on the host, so CUDA graphs can capture the code.
"""

import random
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Ints = TypeVar("Ints", np.ndarray, "Tensor")

_GOLDEN, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_LOW_64 = 2**64 - 1


def _mix(x: Ints) -> Ints:
    """The splitmix64 finalizer (Steele et al. 2014): a bijection on 64 bits whose output looks random."""
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Ints, bits: int) -> Ints:
    return (x >> bits) & (2 ** (64 - bits) - 1)


def random_bits(seeds: Ints, counters: Ints) -> Ints:
    """Return 53 random bits for each pair of a seed and a counter. All arrays are int64 [N]. For seeds see :func:`as_int64`."""
    return _shifted(_mix(_mix(seeds + _GOLDEN) + _GOLDEN * (counters + 1)), 11)


def uniforms(seeds: Seq[int], counters: Seq[int]) -> np.ndarray:
    """Return one uniform float64 number in [0, 1) per pair of seed and counter."""
    keys = np.array([int(seed) & _LOW_64 for seed in seeds], dtype=np.uint64).view(np.int64)
    return random_bits(keys, np.asarray(counters, dtype=np.int64)) * 2.0**-53


def as_int64(number: int) -> int:
    """Return the low 64 bits of ``number`` as a signed integer."""
    low = int(number) & _LOW_64
    return low - 2**64 if low >= 2**63 else low


def derive_seed(*parts: int) -> int:
    """Derive a 63-bit seed from several numbers, for example (run seed, step, prompt, sample)."""
    state = np.zeros(1, dtype=np.int64)
    for part in parts:
        state = _mix(state + _GOLDEN + as_int64(part))
    return int(_shifted(state, 1)[0])


def epoch_order(n: int, *, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """Return the order in which an epoch visits ``n`` rows. The order depends only on the arguments, not on the global RNG."""
    order = list(range(n))
    if shuffle:
        random.Random(f"areno-epoch-order:{seed}:{epoch}").shuffle(order)
    return order
