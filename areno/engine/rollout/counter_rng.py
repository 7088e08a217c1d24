"""Random numbers by counter: a function of their keys, with no state to save. NumPy only."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser (Steele et al. 2014): a bijection on 64 bits that passes for random."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Seq[int], counters: Seq[int]) -> np.ndarray:
    """Numbers in [0, 1), float64, one per pair of seed and counter; equal pairs give equal numbers."""
    with np.errstate(over="ignore"):
        key = _mix(np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64) + _GOLDEN)
        bits = _mix(key + _GOLDEN * (np.asarray(counters, dtype=np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from several numbers, for example (run seed, step, prompt, sample)."""
    state = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _mix(state + _GOLDEN + np.array([part & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    return int(state[0] >> np.uint64(1))


def epoch_order(n: int, *, epoch: int, seed: int, shuffle: bool) -> list[int]:
    """The order in which an epoch visits ``n`` rows: the same for the same arguments, whatever the global RNG state."""
    order = list(range(n))
    if shuffle:
        random.Random(f"areno-epoch-order:{seed}:{epoch}").shuffle(order)
    return order
