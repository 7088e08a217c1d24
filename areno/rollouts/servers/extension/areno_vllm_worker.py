"""Worker extension for vLLM servers. vLLM's workers import this module in an environment that may lack areno."""

from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

WeightTransferEngineFactory.register_engine("areno", "areno_vllm_transfer", "ArenoTransfer")


class ArenoWorker:
    """The class that ``--worker-extension-cls`` adds to vLLM's worker class."""

    model_runner: Any

    def areno_repack(self) -> int:
        """Repack output layers after a weight update, and return how many were repacked.

        On a CPU, vLLM keeps a packed copy of the output layer. If this layer is tied to the embedding, an update changes only
        the embedding. Without repacking, the packed copy would keep the initial weights.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return 0
        layers = [part for part in self.model_runner.model.modules() if isinstance(part, VocabParallelEmbedding)]
        for layer in layers:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return len(layers)
