"""How an engine loads, generates and trains."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.loading import LoadOptions
from areno.engine.parallel.rank_context import RankContext
from areno.engine.rollout.compiled.switch import DecodeMode
from areno.engine.train.optimizer import OptimizerConfig


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    ``trains``: ``reward`` is a sequence classifier, which generates nothing; ``nothing`` is a policy that only generates.
    ``decode``: ``auto`` compiles the decode step beside a run that is long enough, and takes it from disk where an earlier run
    has built it; ``compiled`` builds it before the first token; ``eager`` never compiles.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    trains: Literal["policy", "reward", "nothing"] = "policy"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adapter: AdapterOptions | None = None  # what roles train in place of their weights; None trains those
    attn_backend: str = "flash"  # ``flash`` or ``native``, see :mod:`areno.engine.model.attention`
    activation_checkpointing: bool | None = None  # recompute layers; None does so unless there is room
    tree_training: bool = True  # prompts of a pass are computed once; see :mod:`areno.engine.model.tree`
    offload_activations: bool = False  # layers' inputs wait in the computer's memory; on a GPU
    keep_rollout_state: bool = True
    decode: DecodeMode = "auto"
    builds_decode: bool = True  # ``auto`` may build the step; else it only takes what another process has built
    return_routed_experts: bool = False  # with each sample, for training to choose them again; decoding is eager
    speculate: int = 0  # tokens that prompt lookup may guess ahead; 0 guesses none
    kv_cache_tokens: int | None = None  # None: what training leaves of a GPU, or a share of free memory
    prefix_cache_tokens: int | None = 0  # of finished contexts, beside the budget; None is a quarter of it
    max_running: int = 64
    trust_remote_code: bool = False
    dummy_load: bool = False
    use_kernels: bool = False  # of the Hugging Face hub, in place of layers
    deterministic: bool = False  # PyTorch's deterministic algorithms, in the whole process
    decode_progress_interval_s: float = 10.0
    neighbours: int = 1  # engines like this one that share the machine, each with its own ranks
    shares_device: bool = False  # another process uses the same GPU
    peers: RankContext = field(
        default_factory=RankContext
    )  # ranks with the same configuration, which get the same calls

    @property
    def compute_dtype(self) -> str:
        """``float32`` or ``bfloat16``: what the models compute in."""
        return str(self.dtype).removeprefix("torch.")

    def load_options(self, option: str = "--ckpt") -> LoadOptions:
        """How a checkpoint named by ``option`` is loaded."""
        return LoadOptions(
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            dummy=self.dummy_load,
            attn_backend=self.attn_backend,
            option=option,
            peers=self.peers,
            use_kernels=self.use_kernels,
        )
