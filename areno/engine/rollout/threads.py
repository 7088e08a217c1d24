"""Choose the thread count of each forward pass of a rollout.

A decode step of a small model consists of hundreds of small operations, which are slower on two threads than on one thread. A
forward pass therefore runs on one thread if its average matrix product has fewer than ``PARALLEL_FLOP`` operations. Otherwise,
the forward pass runs on all threads of the process (:mod:`areno.engine.cpu_threads`).
"""

import torch

from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.model.causal_lm import CausalLM

# Break-even of two threads, measured on two cores with a 0.9 M-parameter model: 16 to 32 rows. At 256 rows, two threads take
# 0.5 of the time of one thread in a compiled step, and 0.7 in an eager step.
PARALLEL_FLOP = 1e6


class ThreadRule:
    """Sets the number of threads that PyTorch uses for a forward pass. If the model is not on a CPU, does nothing."""

    def __init__(self, model: CausalLM) -> None:
        # All weight matrices except the small ones of an adapter.
        matrices = [p.numel() for name, p in model.module.named_parameters() if p.ndim >= 2 and ".lora_" not in name]
        self._flop_per_row = 2 * sum(matrices) / max(len(matrices), 1)
        self._all = torch.get_num_threads()
        self._active = model.device.type == "cpu" and self._all > 1

    def threads(self, tokens: int) -> int:
        """Return the number of threads for a forward pass over ``tokens`` tokens."""
        if tokens * self._flop_per_row < PARALLEL_FLOP:
            return 1
        return CPU_THREADS.current() if CPU_THREADS.adapts else self._all

    def apply(self, tokens: int) -> None:
        """Set the calling thread's PyTorch thread count for a forward pass over ``tokens`` tokens."""
        if self._active and torch.get_num_threads() != (threads := self.threads(tokens)):
            torch.set_num_threads(threads)

    def reset(self) -> None:
        """Let PyTorch use all threads of the process again, to undo :meth:`apply`.

        Otherwise, threads that start later would inherit a count that :meth:`apply` has lowered.
        """
        if self._active:
            torch.set_num_threads(CPU_THREADS.current() if CPU_THREADS.adapts else self._all)
