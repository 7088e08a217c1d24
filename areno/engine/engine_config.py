"""How an engine loads, generates and trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.loading import LoadOptions
from areno.engine.parallel.peers import Peers
from areno.engine.rollout.compiled.switch import DecodeMode
from areno.engine.train.optimizer import OptimizerConfig


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        trains: ``policy``; ``reward`` for a sequence classifier, which generates nothing; ``nothing`` for a policy that
            only generates, without an optimizer.
        adapter: what roles train in place of their weights; None trains the weights.
        attn_backend: ``flash`` or ``native``, see :mod:`areno.engine.model.attention`.
        activation_checkpointing: recompute layers in backward; None does so unless a GPU has room for all activations.
        tree_training: compute tokens that rows of a pass begin with once, see :mod:`areno.engine.model.tree`.
        offload_activations: what layers keep for that waits in the computer's memory; for models on a GPU.
        decode: ``auto`` compiles the decode step beside a run that is long enough, and takes it from disk where an earlier
            run has built it; ``compiled`` builds it before the first token; ``eager`` never compiles.
        builds_decode: whether ``auto`` may build the step; else it only takes what another process has built.
        speculate: tokens that prompt lookup may guess ahead, see :mod:`areno.engine.rollout.speculation`; 0 guesses none.
        kv_cache_tokens: KV budget; None takes what training leaves of a GPU, or a share of a machine's free memory.
        prefix_cache_tokens: tokens of finished contexts to keep for requests that begin like them, beside the KV budget;
            0 keeps none, None keeps a quarter of that budget.
        neighbours: engines like this one that share the machine, each with ranks of its own.
        shares_device: another process uses the same GPU.
        peers: other ranks that run an engine of the same configuration and get the same calls.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    trains: Literal["policy", "reward", "nothing"] = "policy"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adapter: AdapterOptions | None = None
    attn_backend: str = "flash"
    activation_checkpointing: bool | None = None
    tree_training: bool = False
    offload_activations: bool = False
    keep_rollout_state: bool = True
    decode: DecodeMode = "auto"
    builds_decode: bool = True
    speculate: int = 0
    kv_cache_tokens: int | None = None
    prefix_cache_tokens: int | None = 0
    max_running: int = 64
    trust_remote_code: bool = False
    dummy_load: bool = False
    decode_progress_interval_s: float = 10.0
    neighbours: int = 1
    shares_device: bool = False
    peers: Peers = field(default_factory=Peers)

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
        )
