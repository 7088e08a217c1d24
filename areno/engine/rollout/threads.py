"""How many threads a rollout call is worth.

A decode step of a small model is hundreds of small operations, and below some size a second thread costs more than it
gains. The rule looks at the work of an average matrix product, so it depends on model and batch alone; above that size the
process's number of threads holds (:mod:`areno.engine.cpu_threads`).
"""

import torch

from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.model.causal_lm import CausalLM

# Where two threads begin to win, measured on two cores with a model of 0.9 M parameters: 16 to 32 rows. At 256 rows two
# take 0.5 of the time of one in a compiled step, and 0.7 in an eager one.
PARALLEL_FLOP = 1e6


class ThreadRule:
    """Sets torch's threads for the calling thread before each call; does nothing on an accelerator."""

    def __init__(self, model: CausalLM) -> None:
        # Trained or not, but without the small matrices of an adapter.
        matrices = [p.numel() for name, p in model.module.named_parameters() if p.ndim >= 2 and ".lora_" not in name]
        self._flop_per_row = 2 * sum(matrices) / max(len(matrices), 1)
        self._all = torch.get_num_threads()
        self._active = model.device.type == "cpu" and self._all > 1

    def threads(self, rows: int) -> int:
        """Threads for a call over ``rows`` tokens."""
        if rows * self._flop_per_row < PARALLEL_FLOP:
            return 1
        return CPU_THREADS.current() if CPU_THREADS.adapts else self._all

    def apply(self, rows: int) -> None:
        """Use that many in the calling thread."""
        if self._active and torch.get_num_threads() != (threads := self.threads(rows)):
            torch.set_num_threads(threads)

    def reset(self) -> None:
        """Back to all threads; torch hands the last setting on to threads that start later."""
        if self._active:
            torch.set_num_threads(CPU_THREADS.current() if CPU_THREADS.adapts else self._all)
