"""Worker extension of vLLM servers: imported by vLLM's workers, whose environment need not have areno."""

from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

WeightTransferEngineFactory.register_engine("areno", "areno_vllm_transfer", "ArenoTransfer")


class ArenoWorker:
    """Added to vLLM's worker class by ``--worker-extension-cls``."""

    model_runner: Any

    def areno_repack(self) -> int:
        """Pack output layers anew after a weight update; returns how many.

        On a CPU, vLLM keeps a packed copy of an output layer. Where that is tied to the embedding, an update changes the
        embedding alone, and the copy would go on answering with the weights of the start.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return 0
        found = [part for part in self.model_runner.model.modules() if isinstance(part, VocabParallelEmbedding)]
        for part in found:
            dispatch_cpu_unquantized_gemm(part, remove_weight=False)
        return len(found)
