"""Counter-based random numbers. A random number depends only on a seed and a counter, not on earlier random numbers.

The arithmetic uses int64, which wraps around like uint64. After each right shift, a mask clears the copies of the sign
bit. The same code works on NumPy arrays and on tensors. CUDA graphs can capture the code, because the host reads no tensor
values.
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
    """Apply the splitmix64 finalizer (Steele et al. 2014), a bijection on 64 bits whose output looks random."""
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Ints, bits: int) -> Ints:
    return (x >> bits) & (2 ** (64 - bits) - 1)


def random_bits(seeds: Ints, counters: Ints) -> Ints:
    """Return 53 random bits for each pair of seed and counter. The arguments and the result are int64 [N].

    If a seed does not fit into int64, convert it with :func:`as_int64` first.
    """
    return _shifted(_mix(_mix(seeds + _GOLDEN) + _GOLDEN * (counters + 1)), 11)


def uniforms(seeds: Seq[int], counters: Seq[int]) -> np.ndarray:
    """Return one uniform random number in [0, 1), in float64, for each pair of seed and counter."""
    keys = np.array([int(seed) & _LOW_64 for seed in seeds], dtype=np.uint64).view(np.int64)
    return random_bits(keys, np.asarray(counters, dtype=np.int64)) * 2.0**-53


def as_int64(number: int) -> int:
    """Return the low 64 bits of ``number`` as a signed integer."""
    low = int(number) & _LOW_64
    return low - 2**64 if low >= 2**63 else low


def derive_seed(*parts: int) -> int:
    """Derive a 63-bit seed from several numbers, for example from the numbers of a run, a step, a prompt and a sample."""
    state = np.zeros(1, dtype=np.int64)
    for part in parts:
        state = _mix(state + _GOLDEN + as_int64(part))
    return int(_shifted(state, 1)[0])


def epoch_order(n: int, *, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """Return the order of ``n`` rows in an epoch. The order depends only on the arguments, not on global random state."""
    order = list(range(n))
    if shuffle:
        random.Random(f"areno-epoch-order:{seed}:{epoch}").shuffle(order)
    return order
