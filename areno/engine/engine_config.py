"""Settings of an engine."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.loading import LoadOptions
from areno.engine.parallel.rank_context import RankContext
from areno.engine.rollout.compiled.switch import DecodeMode
from areno.engine.train.optimizer import OptimizerOptions


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Settings for loading models, for generation, and for training.

    ``trains`` determines which kind of model the actor is, and whether the actor has an optimizer. With ``policy``, the actor
    is a language model with an optimizer. With ``nothing``, the actor is a language model without an optimizer. With
    ``reward``, the actor is a sequence classifier with an optimizer, and cannot generate.

    ``decode`` is ``auto``, ``compiled`` or ``eager``. On a GPU, ``eager`` disables CUDA graphs. On a CPU, the values have these
    meanings: ``eager`` never compiles the decode step, and never loads a compiled step. ``compiled`` loads or compiles the
    decode step before the first token is generated. ``auto`` loads the decode step that an earlier run has compiled. If no
    earlier run has compiled the step, ``auto`` compiles the step in the background, provided that enough tokens remain to be
    generated.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    trains: Literal["policy", "reward", "nothing"] = "policy"
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    adapter: AdapterOptions | None = None  # trainable adapter; None: the full weights are trained
    attn_backend: str = "flash"  # ``flash`` or ``native``, see :mod:`areno.engine.model.attention`
    activation_checkpointing: bool | None = None  # recompute layers; None: only if memory is short
    tree_training: bool = True  # compute common prefixes once; see :mod:`areno.engine.model.tree`
    offload_activations: bool = False  # keep layer inputs in host memory; GPU only
    keep_rollout_state: bool = True
    decode: DecodeMode = "auto"
    builds_decode: bool = True  # False: ``auto`` only loads steps that another process has compiled
    return_routed_experts: bool = False  # for routing replay; on a CPU, this disables compiled decoding
    speculate: int = 0  # maximum draft tokens of speculative decoding; 0 turns it off
    kv_cache_tokens: int | None = None  # None: GPU memory left by training, or a share of free memory
    prefix_cache_tokens: int | None = 0  # in addition to the KV cache; None: a quarter of the KV cache
    max_running: int = 64
    trust_remote_code: bool = False
    random_path: str | None = None  # models of this checkpoint get random weights instead of its weights
    random_seed: int = 0  # seed of the random weights, so that a reference equals the initial actor
    use_kernels: bool = False  # replace layers with kernels from the Hugging Face hub
    deterministic: bool = False  # process-wide deterministic PyTorch algorithms
    decode_progress_interval_s: float = 10.0
    neighbors: int = 1  # number of engines, including this one, that share this machine's memory
    shares_device: bool = False  # whether another process uses the same GPU
    peers: RankContext = field(default_factory=RankContext)  # this rank's place and communication groups

    @property
    def compute_dtype(self) -> str:
        """Dtype of the forward and backward passes: ``float32``, ``bfloat16`` or ``float16``."""
        return str(self.dtype).removeprefix("torch.")

    def load_options(self, option: str = "--ckpt", path: str | None = None) -> LoadOptions:
        """Return the options for loading the checkpoint ``path``.

        Error messages contain ``option``, the name of the option that sets ``path`` (such as ``--ckpt``).
        """
        return LoadOptions(
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            dummy=path is not None and path == self.random_path,
            seed=self.random_seed,
            attn_backend=self.attn_backend,
            option=option,
            peers=self.peers,
            use_kernels=self.use_kernels,
        )
