"""How many threads a rollout call is worth.

A decode step of a small model is hundreds of small operations, and waking a second thread for each costs more than it
gains: on two cores, one thread decodes 32 rows of a 0.9 M model 2.3 times faster than two. The rule looks at the work
of an average matrix product, so it depends on model and batch alone; measuring instead would make runs irreproducible.
"""

from __future__ import annotations

import torch

from areno.engine.model.causal_lm import CausalLM

# Where two threads begin to win, measured on two cores with models of 0.9 M and 11 M parameters.
PARALLEL_FLOP = 25e6
# A compiled step has fewer and larger parallel regions.
COMPILED_PARALLEL_FLOP = 2e6


class ThreadRule:
    """Sets torch's threads for the calling thread before each call; does nothing on an accelerator.

    Args:
        model: decides how large its matrix products are.
    """

    def __init__(self, model: CausalLM) -> None:
        matrices = [p.numel() for _, p in model.parameters() if p.ndim >= 2]
        self._flop_per_row = 2 * sum(matrices) / max(len(matrices), 1)
        self._all = torch.get_num_threads()
        self._active = model.device.type == "cpu" and self._all > 1

    def threads(self, rows: int, compiled: bool = False) -> int:
        """Threads for a call over ``rows`` tokens."""
        worth = COMPILED_PARALLEL_FLOP if compiled else PARALLEL_FLOP
        return self._all if rows * self._flop_per_row >= worth else 1

    def apply(self, rows: int, compiled: bool = False) -> None:
        """Use that many in the calling thread."""
        if self._active and torch.get_num_threads() != self.threads(rows, compiled):
            torch.set_num_threads(self.threads(rows, compiled))

    def reset(self) -> None:
        """Back to all threads; torch hands the last setting on to threads that start later."""
        if self._active:
            torch.set_num_threads(self._all)
