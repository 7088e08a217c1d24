"""vLLM's CPU worker with a clock: how long the warm-up took, in which the model is compiled. Runs in .peers/vllm."""

from __future__ import annotations

import time

from vllm.v1.worker.cpu_worker import CPUWorker


class TimedWorker(CPUWorker):
    """See the module's text; vLLM itself reports no compile time on CPUs."""

    def determine_available_memory(self) -> int:
        """Warm up, as the CPU worker does here, and remember how long it took."""
        began = time.perf_counter()
        try:
            return super().determine_available_memory()
        finally:
            self._compile_seconds = time.perf_counter() - began

    def compile_seconds(self) -> float:
        """For ``LLM.collective_rpc``."""
        return self._compile_seconds
